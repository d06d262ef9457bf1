"""Module trees that are read as native decoders, and those that must not be."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.family_configs import checkpoint_of, other_config
from tests.fakes.models import FAKES
from tests.fakes.tiny import Tiny, TinyCheckpoint, prompt_of
from tokenmesh.services.worker_svc.models.checkpoint import Checkpoint
from tokenmesh.services.worker_svc.models.hf.build import read_tree
from tokenmesh.services.worker_svc.models.hf.facts import HfFacts
from tokenmesh.services.worker_svc.models.hf.model import HfModel
from tokenmesh.services.worker_svc.models.load import read_model_facts
from tokenmesh.services.worker_svc.models.promotion.promote import promote
from tokenmesh.services.worker_svc.models.promotion.read_heads import Unread
from tokenmesh.services.worker_svc.models.raw_config import read_json
from tokenmesh.shared.config.model import ModelSettings

NUM_TOKENS = 16
UNREAD = ("ministral3", "hunyuan")
"""Fakes that the general kind does not read as native ones: queries that grow with the position,
and a rope that transformers' own config class does not have."""
ONLY_PROMOTED = ("gemma", "gemma2", "gemma3_text")
"""Fakes that the native kind has no entry for."""
REASONS = {
    "Qwen3MoeForCausalLM": "layer 0: it has no gated MLP",
    "Cohere2ForCausalLM": "it does not end with an RMS norm",
    "StableLmForCausalLM": "it does not end with an RMS norm",
}


def assert_same_tokens(checkpoint: TinyCheckpoint) -> None:
    prompts = [prompt_of(37, seed=1), prompt_of(20, seed=2)]
    driver = EngineDriver(checkpoint.directory, model_impl="transformers", max_num_batched_tokens=7)
    jobs = [Job(prompt, greedy(NUM_TOKENS)) for prompt in prompts]
    assert driver.tokens(jobs) == checkpoint.greedy(prompts, NUM_TOKENS)


@pytest.mark.parametrize("name", [*ONLY_PROMOTED, *(n for n in FAKES if n not in UNREAD)])
def test_families_are_promoted(tiny: Tiny, name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert_same_tokens(tiny(name))
    assert "runs as a native decoder" in caplog.text


@pytest.mark.parametrize("architecture", REASONS)
def test_other_families_stay_trees(
    tmp_path: Path, architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert_same_tokens(checkpoint_of(tmp_path / "model", other_config(architecture)))
    assert f"stays a module tree: {REASONS[architecture]}" in caplog.text


def tree_of(directory: Path, dtype: torch.dtype = torch.float32) -> HfModel:
    raw = read_json(directory / "config.json")
    facts = read_model_facts(
        raw, directory, ModelSettings(model=str(directory), model_impl="transformers")
    )
    assert isinstance(facts, HfFacts)
    model, _ = read_tree(facts, Checkpoint(directory), dtype, lambda done, total: None)
    return model


def _other_scale(layer: Any) -> None:
    layer.self_attn.scaling *= 2


def _other_eps(layer: Any) -> None:
    layer.input_layernorm.variance_epsilon = 1e-3


def _halved_residual(layer: Any) -> None:
    inner = layer.mlp.forward
    layer.mlp.forward = lambda x: 0.5 * inner(x)


def _more_weights(layer: Any) -> None:
    layer.extra = torch.nn.Linear(2, 2)


def _far_window(layer: Any) -> None:
    inner = layer.self_attn.forward
    layer.self_attn.forward = lambda hidden_states, **named: inner(
        hidden_states=hidden_states.flip(1), **named
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_other_scale, "its layers differ in more than window and rope"),
        (_other_eps, "layer 1: its norms differ in eps"),
        (_halved_residual, "layer 1: it has no gated MLP"),
        (_more_weights, "layer 1: it has weights beside those of a plain layer"),
        (_far_window, "layer 1: "),
    ],
    ids=["scale", "eps", "residual", "weights", "order"],
)
@torch.inference_mode()
def test_a_tree_with_one_layer_of_another_kind_stays_a_tree(
    tiny: Tiny, change: Any, reason: str
) -> None:
    model = tree_of(tiny("llama").directory)
    layers: Any = model.tree.body.layers
    change(layers[1])
    with pytest.raises(Unread, match=f"^{reason}"):
        promote(model, False)
    assert not any(parameter.is_meta for parameter in model.tree.body.parameters())
