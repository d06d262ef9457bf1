"""Names and expressions of adapters' configs choose modules, ranks and scalings as in PEFT."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.engine.test_adapters import LORA, config, merged_with
from tests.fakes.adapters import AdapterSpec, write_adapter, write_tensors
from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.general_models import make_general
from tests.fakes.models import make_model
from tests.fakes.tiny import Tiny, TinyCheckpoint, prompt_of
from tokenmesh.engine.adapters import peft_config
from tokenmesh.engine.adapters.adapter import AdapterSource
from tokenmesh.engine.adapters.name_pattern import Steps
from tokenmesh.engine.adapters.targets import BadTarget, read_targets
from tokenmesh.shared.errors import InvalidInput


@pytest.fixture(scope="module")
def reader(tiny: Tiny) -> AdapterSource:
    return EngineDriver(tiny("llama").directory, lora=LORA).model.adapters


@pytest.mark.parametrize(
    ("keys", "chosen"),
    [
        ({"target_modules": ["q_proj", "mlp.up_proj"]}, r"q_proj|mlp\.up_proj"),
        ({"target_modules": r".*\.1\.self_attn\.(q|v)_proj"}, r"\.1\.self_attn\.[qv]_proj"),
        ({"target_modules": r"^(?!.*mlp).*(?:[a-z]_proj)"}, "self_attn"),
        ({"exclude_modules": ["v_proj", "model.layers.0.mlp.up_proj"]},
         r"(?<!v_proj)(?<!layers\.0\.mlp\.up_proj)$"),
        ({"exclude_modules": r".*layers\.[01]\..*"}, r"layers\.2\."),
        ({"layers_to_transform": [0, 2]}, r"layers\.[02]\."),
        ({"layers_to_transform": 1, "layers_pattern": "layers"}, r"layers\.1\."),
        ({"layers_to_transform": [1], "layers_pattern": ["h", "la[xy]ers"]}, r"layers\.1\."),
        ({"target_modules": ["q_proj", "model.layers.0.mlp.up_proj"], "layers_to_transform": [1]},
         r"layers\.1\.self_attn\.q_proj|layers\.0\.mlp\.up_proj"),
        ({"target_modules": "all-linear"}, ""),
    ],
)  # fmt: skip
def test_only_modules_that_the_config_chooses_are_adapted(
    reader: AdapterSource, tmp_path: Path, keys: dict[str, Any], chosen: str
) -> None:
    """PEFT leaves tensors of the others unused."""
    path = write_adapter(make_model("llama"), tmp_path / "whole")
    found = load_file(path / "adapter_model.safetensors")
    kept = {name: each for name, each in found.items() if re.search(chosen, name.split(".lora")[0])}
    write_tensors(tmp_path / "kept", kept, AdapterSpec())
    assert kept
    assert (len(kept) < len(found)) == bool(chosen)
    config(**keys)(path)
    assert reader.read(path).content_hash == reader.read(tmp_path / "kept").content_hash


@pytest.mark.parametrize("saved", ["score", "ore", "h.score", "s.ore", "(h|x)", "score.in", "a-b"])
def test_what_is_at_or_within_a_saved_module_is_chosen_as_by_peft(saved: str) -> None:
    targets = read_targets({}, (saved,), Steps())
    for name in (
        "score",
        "h.score",
        "score.in",
        "h.score.in",
        "ore",
        "score2",
        "x.ascore",
        "a-b.c",
    ):
        is_saved = re.match(rf"(^|.*\.){saved}($|\..*)", name) is not None
        assert targets.has_module(name) != is_saved, name


SLOW = "(?:(?=(?:(?=.*x)|.)*y)|.)*z"


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"target_modules": SLOW}, "target_modules is an expression that takes too long to match"),
        ({"exclude_modules": SLOW}, "exclude_modules is an expression that takes too long"),
        ({"rank_pattern": {SLOW: 2}}, "rank_pattern has an expression that takes too long"),
        ({"alpha_pattern": {SLOW: 2}}, "alpha_pattern has an expression that takes too long"),
    ],
)
def test_an_expression_that_takes_too_many_steps_is_refused_by_its_key(
    reader: AdapterSource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys: dict[str, Any],
    problem: str,
) -> None:
    path = write_adapter(make_model("llama"), tmp_path / "a")
    config(**keys)(path)
    monkeypatch.setattr(peft_config, "Steps", lambda: Steps(200))
    with pytest.raises(InvalidInput, match=problem):
        reader.read(path)


def test_an_expression_for_saved_modules_has_as_few_steps() -> None:
    with pytest.raises(BadTarget, match="takes too long"):
        read_targets({}, (SLOW,), Steps(200)).has_module("model.layers.0.mlp.up_proj")


def test_patterns_of_ranks_are_expressions_for_modules_and_parameters_of_experts(
    tiny: Tiny, tmp_path: Path
) -> None:
    """PEFT writes such keys for GLM-4-MoE and DeepSeek-V3, whose gate and up are one parameter."""
    driver = EngineDriver(tiny("glm4_moe").directory, lora=LORA)
    ranks = {r".*\.gate_up_proj": 8, r".*\.(?:1|2)\.self_attn\.q_proj": 2}
    alphas = {r".*\.gate_up_proj": 16, r"layers\.\d\.mlp\.experts\.down_proj": 5}
    spec = AdapterSpec(
        modules=("q_proj", "o_proj"),
        experts=True,
        ranks=ranks,
        alphas=alphas,
        config={"use_rslora": True},
    )
    path = write_adapter(make_general("glm4_moe"), tmp_path / "a", spec)
    merged = TinyCheckpoint(path, partial(merged_with, "glm4_moe", path))
    prompt = prompt_of(14)
    read = driver.model.adapters.read(path)
    assert read.rank == 8
    expected = merged.greedy([prompt], 8)
    assert driver.tokens([Job(prompt, greedy(8), adapter=read)]) == expected
    assert expected != tiny("glm4_moe").greedy([prompt], 8)
