"""Layers that predict further tokens are left out by what config.json says, for every class."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.test_general_kind import check_greedy, jobs_of
from tests.fakes.engine_driver import EngineDriver
from tests.fakes.tiny import Tiny, prompt_of
from tokenmesh.engine.models.extra_layers import extra_layers
from tokenmesh.engine.models.load import read_model_facts
from tokenmesh.engine.models.raw_config import RawConfig, read_json
from tokenmesh.engine.models.tree.facts import HfFacts
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import CheckpointError

PROMPTS: Final = [prompt_of(21), prompt_of(9, seed=3)]
FILE: Final = "model.safetensors"


def with_extra(source: Path, target: Path, layer: int, config: Mapping[str, Any]) -> Path:
    """A copy with the tensors of the last layer under another number, and those of a predictor."""
    values = json.loads((source / "config.json").read_text())
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        values.pop(key, None)
    tensors = load_file(source / FILE)
    last = f"model.layers.{values['num_hidden_layers'] - 1}."
    names = [name for name in tensors if name.startswith(last)]
    width = values["hidden_size"]
    extra = {name.replace(last, f"model.layers.{layer}."): tensors[name].clone() for name in names}
    extra[f"model.layers.{layer}.eh_proj.weight"] = torch.randn(width, 2 * width)
    extra[f"model.layers.{layer}.enorm.weight"] = torch.ones(width)
    extra[f"model.layers.{layer}.shared_head.norm.weight"] = torch.ones(width)
    save_file(tensors | extra, target / FILE, {"format": "pt"})
    (target / "config.json").write_text(json.dumps(values | config))
    return target


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "num_mtp_layers"])
@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "qwen3_moe", "llama"])
def test_a_layer_behind_the_last_one_is_left_out_where_config_json_counts_it(
    tiny: Tiny, tmp_path: Path, name: str, key: str
) -> None:
    directory = with_extra(tiny(name).directory, tmp_path, 3, {key: 1})
    outcomes = EngineDriver(directory, max_num_batched_tokens=16).run(jobs_of(PROMPTS))
    check_greedy(tiny(name), PROMPTS, outcomes)


@pytest.mark.parametrize("name", ["glm4_moe", "llama"])
@pytest.mark.parametrize("config", [{}, {"num_nextn_predict_layers": 0}])
def test_a_layer_that_config_json_does_not_count_is_refused(
    tiny: Tiny, tmp_path: Path, name: str, config: dict[str, int]
) -> None:
    directory = with_extra(tiny(name).directory, tmp_path, 3, config)
    with pytest.raises(CheckpointError, match=r"(unexpected|unknown) tensors: model\.layers\.3\."):
        EngineDriver(directory)


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "num_mtp_layers"])
@pytest.mark.parametrize(("name", "layer"), [("glm4_moe", 46), ("deepseek_v3", 61)])
def test_no_layer_is_left_out_for_its_number_alone(
    tiny: Tiny, tmp_path: Path, name: str, layer: int, key: str
) -> None:
    """transformers' classes drop these numbers whatever config.json says."""
    directory = with_extra(tiny(name).directory, tmp_path, layer, {key: 1})
    with pytest.raises(CheckpointError) as error:
        EngineDriver(directory)
    assert f"unexpected tensors: model.layers.{layer}." in error.value.message
    assert f"config.json states 3 layers, and by {key} 1 more" in str(error.value)


@pytest.mark.parametrize("count", [-1, "1", True])
def test_a_count_that_is_none_is_refused_by_its_key(
    tiny: Tiny, tmp_path: Path, count: object
) -> None:
    directory = with_extra(
        tiny("llama").directory, tmp_path, 3, {"num_nextn_predict_layers": count}
    )
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers is"):
        EngineDriver(directory)


def test_a_predictor_under_a_name_of_its_own_is_left_out_too(tiny: Tiny, tmp_path: Path) -> None:
    directory = with_extra(tiny("llama").directory, tmp_path, 3, {"num_nextn_predict_layers": 1})
    tensors = load_file(directory / FILE)
    named = {name.replace("layers.3.", "mtp_layers.0."): each for name, each in tensors.items()}
    save_file(named, directory / FILE, {"format": "pt"})
    outcomes = EngineDriver(directory).run(jobs_of(PROMPTS))
    check_greedy(tiny("llama"), PROMPTS, outcomes)


def test_layers_of_towers_are_none_of_them(tiny: Tiny) -> None:
    settings = ModelSettings(model=str(tiny("glm4_moe").directory))
    facts = read_model_facts(
        read_json(tiny("glm4_moe").directory / "config.json"), tiny("glm4_moe").directory, settings
    )
    assert isinstance(facts, HfFacts)
    kind: Any = type("Kind", (), {"tokenmesh_towers": ("model.visual",)})
    counted = replace(facts, kind=kind, extra_layers=range(3, 4))
    assert counted.is_extra("model.language_model.layers.3.norm.weight")
    assert not counted.is_extra("model.visual.layers.3.norm.weight")
    assert not counted.is_extra("visual.layers.3.norm.weight")


def test_without_a_depth_no_layer_is_behind_the_last_one() -> None:
    assert not extra_layers(RawConfig({"num_mtp_layers": 2}, "config.json"), None)
