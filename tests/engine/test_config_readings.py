"""config.json read as transformers reads it, or refused: log-probabilities in float32."""

from pathlib import Path
from typing import Any, Final

import pytest
import torch

from tests.fakes.family_configs import checkpoint_of, config_of, logits_of
from tests.fakes.tiny import prompt_of
from tokenmesh.engine.models.native.read_config import read_facts
from tokenmesh.engine.models.raw_config import RawConfig
from tokenmesh.shared.errors import CheckpointError

ATOL: Final = 2e-4
_SLIDING, _FULL = "sliding_attention", "full_attention"
_TYPES: Final = [_SLIDING, _FULL, _SLIDING, _FULL]
_YARN: Final = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LONG: Final = {
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
}

READINGS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "mistral with layer types": (
        "MistralForCausalLM",
        {"sliding_window": 7, "layer_types": _TYPES, "rope_theta": 1e5},
    ),
    "mistral without layer types": ("MistralForCausalLM", {"sliding_window": 7}),
    "an empty rope_scaling": (
        "LlamaForCausalLM",
        {"rope_scaling": {}, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "phi3 calls longrope yarn": (
        "Phi3ForCausalLM",
        {"original_max_position_embeddings": 64, "rope_scaling": {"type": "yarn", **_LONG}},
    ),
    "phi3 calls longrope su and is beyond its length": (
        "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 32,
            "rope_scaling": {"type": "su", "original_max_position_embeddings": 32, **_LONG},
        },
    ),
    "olmo3 in the old style with its own theta": (
        "Olmo3ForCausalLM",
        {"sliding_window": 8, "rope_theta": 500000.0, "rope_scaling": _YARN},
    ),
    "olmo3 by layer type": (
        "Olmo3ForCausalLM",
        {
            "sliding_window": 8,
            "rope_parameters": {
                _FULL: {**_YARN, "rope_theta": 1e4},
                _SLIDING: {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "ministral3 with rope_scaling": (
        "Ministral3ForCausalLM",
        {
            "rope_theta": 1e4,
            "rope_scaling": {
                **_YARN,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    "ministral3 without a word on rope": ("Ministral3ForCausalLM", {"rope_parameters": None}),
    "phi3 without its original length": (
        "Phi3ForCausalLM",
        {"max_position_embeddings": 8192, "rope_scaling": {"type": "longrope", **_LONG}},
    ),
    "hunyuan with a fixed alpha": (
        "HunYuanDenseV1ForCausalLM",
        {"rope_scaling": {"type": "dynamic", "alpha": 100.0, "factor": 1.0, "beta_fast": 32}},
    ),
}


@pytest.mark.parametrize("name", READINGS)
def test_log_probabilities_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    architecture, values = READINGS[name]
    checkpoint = checkpoint_of(tmp_path / "model", config_of(architecture, **values))
    prompt = prompt_of(50)
    expected = checkpoint.logits(prompt).log_softmax(-1)
    for native, chunk in ((True, 50), (False, 50), (True, 7)):
        ours = logits_of(checkpoint.directory, prompt, native=native, chunk=chunk).log_softmax(-1)
        torch.testing.assert_close(ours, expected, atol=ATOL, rtol=0)


REFUSED: Final[dict[str, tuple[str, dict[str, Any], str]]] = {
    "an unknown key of a rope object": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        "mrope_section",
    ),
    "a key of another family's rope": (
        "LlamaForCausalLM",
        {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 100.0}},
        "alpha",
    ),
    "an unknown kind of rope": (
        "Qwen3ForCausalLM",
        {"rope_parameters": {"rope_type": "proportional"}},
        "rope_type",
    ),
    "a kind that phi3 does not have": (
        "Phi3ForCausalLM",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_type",
    ),
    "a rope of half a pair": (
        "GlmForCausalLM",
        {"head_dim": 12, "partial_rotary_factor": 0.25},
        "partial_rotary_factor turns 3 of",
    ),
    "olmo3 in the old style with another theta": (
        "Olmo3ForCausalLM",
        {"sliding_window": 8, "rope_theta": 10000.0},
        "rope_theta",
    ),
    "olmo3 with one rope for all layers": (
        "Olmo3ForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "rope_parameters",
    ),
    "olmo3 with a rope that is not an object": (
        "Olmo3ForCausalLM",
        {"rope_parameters": {_FULL: [1]}},
        "full_attention is not an object",
    ),
    "a window in a family that slides none": ("LlamaForCausalLM", {"sliding_window": 9}, "window"),
    "sliding layers in a family that slides none": (
        "GraniteForCausalLM",
        {"layer_types": _TYPES},
        "layer_types",
    ),
    "layer types where all layers are alike": (
        "Phi3ForCausalLM",
        {"sliding_window": 9, "layer_types": _TYPES},
        "layer_types",
    ),
    "sliding layers without a window": (
        "MistralForCausalLM",
        {"sliding_window": None, "layer_types": _TYPES},
        "layer_types",
    ),
    "sliding layers with a window that is not used": (
        "SmolLM3ForCausalLM",
        {"sliding_window": 9, "use_sliding_window": False, "layer_types": _TYPES},
        "layer_types",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_read_differently_is_refused_by_name(name: str) -> None:
    architecture, values, key = REFUSED[name]
    with pytest.raises(CheckpointError, match=key):
        read_facts(RawConfig(config_of(architecture, **values), "config.json"))
