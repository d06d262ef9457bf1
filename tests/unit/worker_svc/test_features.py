"""One table says which kinds of workers refuse which settings."""

import ast
import re
from pathlib import Path
from typing import Any, Final

import pytest

from tokenmesh.engine.exec.features import FEATURES, KINDS, Feature, WorkerKind, check_features
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError

ROOT: Final = Path(__file__).parents[3] / "tokenmesh/engine/exec"
ASKED: Final[dict[str, Any]] = {
    "model.speculative_config": {"method": "ngram"},
    "worker.batch_invariant": True,
    "worker.block_size": 24,
    "worker.kv_cache_dtype": "int8",
    "worker.kv_offloading_size": 1,
    "worker.logprobs_mode": "processed_logprobs",
    "worker.lora.enable_lora": {"enable_lora": True},
}


def settings_with(key: str) -> tuple[ModelSettings, WorkerSettings]:
    section, name, *_ = key.split(".")
    given = {name: ASKED[key]}
    model = ModelSettings.model_validate({"model": "m", **(given if section == "model" else {})})
    return model, WorkerSettings.model_validate(given if section == "worker" else {})


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.key)
def test_a_kind_of_worker_refuses_what_the_table_says_and_nothing_else(feature: Feature) -> None:
    model, worker = settings_with(feature.key)
    assert feature.is_asked(model, worker)
    for kind in KINDS:
        if kind not in feature.refused:
            check_features(kind, model, worker)
            continue
        with pytest.raises(ConfigError, match=re.escape(feature.refused[kind])) as caught:
            check_features(kind, model, worker)
        assert caught.value.param == feature.key


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_kind_of_worker_refuses_the_defaults(kind: WorkerKind) -> None:
    check_features(kind, ModelSettings(model="m"), WorkerSettings())


def test_no_refusal_of_a_setting_on_a_gpu_stands_outside_of_the_table() -> None:
    found = []
    for path in ROOT.rglob("*.py"):
        if path.name in ("features.py", "device.py", "divisible.py"):  # ranks have a list of theirs
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "ConfigError":
                text = ast.unparse(node)
                if re.search(r"on a GPU|CPUs? only|for CPUs", text):
                    found.append(f"{path.name}: {text}")
    assert found == []
