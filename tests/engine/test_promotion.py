"""Module trees that are read as native decoders, and those that must not be."""

import dataclasses
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.family_configs import checkpoint_of, decoder_logits, other_config
from tests.fakes.models import FAKES
from tests.fakes.tiny import Tiny, TinyCheckpoint, prompt_of
from tests.ops.native import needs_native
from tests.rounds import some
from tokenmesh.engine.layers.mlp import Experts
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.load import read_model_facts
from tokenmesh.engine.models.promotion.promote import identity, promote
from tokenmesh.engine.models.promotion.read_heads import Unread
from tokenmesh.engine.models.raw_config import read_json
from tokenmesh.engine.models.tree.build import read_tree
from tokenmesh.engine.models.tree.facts import HfFacts
from tokenmesh.engine.models.tree.model import HfModel
from tokenmesh.shared.config.model import ModelSettings

NUM_TOKENS = 16
ATOL = 2e-4
EXPERTS = {
    "mixtral": ("softmax", True, [True] * 3),
    "qwen2_moe": ("softmax", False, [True, False, True]),
    "qwen3_moe": ("softmax", True, [True] * 3),
    "qwen3_moe_raw": ("softmax", False, [False, True, True]),
    "olmoe_unclipped": ("softmax", False, [True] * 3),
    "hunyuan_v1_moe": ("softmax", True, [True] * 3),
    "minimax_m2": ("sigmoid", True, [True] * 3),
    "ernie4_5_moe": ("softmax", True, [False, True, True]),
    "gpt_oss": ("softmax", True, [True] * 4),
    "glm4_moe_one_group": ("sigmoid", True, [False, True, True]),
    "exaone_moe_one_group": ("sigmoid", True, [False, True, True, True]),
}
"""The router's function, whether weights are normalized, and the layers that have experts."""
IN_TORCH = frozenset({"mixtral", "qwen2_moe", "glm4_moe_one_group", "gpt_oss"})
"""Softmax with and without normalized weights, sigmoid with a correction, biases and clipping."""
UNREAD = ("ministral3", "hunyuan")
"""Fakes that the general kind does not read as native ones: queries that grow with the position,
and a rope that transformers' own config class does not have."""
ONLY_PROMOTED = ("gemma", "gemma2", "gemma3_text")
"""Fakes that the native kind has no entry for."""
EVERY_LINE = frozenset(
    {
        *("gemma", "gemma2", "gemma3_text", "phi3", "phi3_longrope_short", "exaone4", "glm4"),
        *("olmo2", "olmo3", "llama_dynamic", "llama_odd", "mistral", "granite"),
    }
)
"""Between them they run every line and branch of ours that all of them run."""
REASONS = {
    "Glm4MoeForCausalLM": "layer 1: its router chooses in an unsupported way",
    "Cohere2ForCausalLM": "it does not end with an RMS norm",
    "StableLmForCausalLM": "it does not end with an RMS norm",
}


def assert_same_tokens(checkpoint: TinyCheckpoint) -> None:
    prompts = [prompt_of(37, seed=1), prompt_of(20, seed=2)]
    driver = EngineDriver(checkpoint.directory, model_impl="transformers", max_num_batched_tokens=7)
    jobs = [Job(prompt, greedy(NUM_TOKENS)) for prompt in prompts]
    tokens = driver.tokens(jobs)
    assert tokens == checkpoint.greedy(prompts, NUM_TOKENS, tokens)


@some([*ONLY_PROMOTED, *(n for n in FAKES if n not in UNREAD)], EVERY_LINE)
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


@some(EXPERTS, IN_TORCH)
def test_families_with_experts_are_promoted(
    tiny: Tiny, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert_same_tokens(tiny(name))
    assert "runs as a native decoder" in caplog.text


@pytest.mark.parametrize(
    ("name", "native"),
    [
        *(pytest.param(name, True, id=f"{name}-native", marks=needs_native) for name in EXPERTS),
        *(
            pytest.param(
                *(name, False),
                id=f"{name}-torch",
                marks=() if name in IN_TORCH else pytest.mark.slow,
            )
            for name in EXPERTS
        ),
    ],
)
@torch.inference_mode()
def test_logits_of_promoted_experts_equal_those_of_transformers(
    tiny: Tiny, name: str, native: bool
) -> None:
    decoder = promote(tree_of(tiny(name).directory), native)
    assert decoder.has_program == native
    scores, is_normalized, has_experts = EXPERTS[name]
    routings = [layer.routing for layer in decoder.config.layers]
    assert [routing is not None for routing in routings] == has_experts
    for routing in filter(None, routings):
        assert (routing.top_k, routing.scores, routing.is_normalized) == (2, scores, is_normalized)
    prompt = prompt_of(50)
    expected = tiny(name).logits(prompt)
    assert expected.std() > 1.0
    for chunk in (7, len(prompt)):
        logits = decoder_logits(decoder, prompt, chunk)
        torch.testing.assert_close(logits, expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize(
    ("name", "is_wide"), [("qwen3_moe", False), ("mixtral", False), ("glm4_moe_one_group", True)]
)
@needs_native
@torch.inference_mode()
def test_routers_compute_in_the_dtype_that_those_of_transformers_do(
    tiny: Tiny, name: str, is_wide: bool
) -> None:
    decoder = promote(tree_of(tiny(name).directory, torch.bfloat16), True)
    assert decoder.has_program
    experts = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, Experts)]
    assert [each.is_wide for each in experts] == [is_wide] * len(experts)
    prompt = prompt_of(50)
    by_program = decoder_logits(decoder, prompt, len(prompt))
    by_torch = decoder_logits(dataclasses.replace(decoder, program=None), prompt, len(prompt))
    errors = (by_program - by_torch).norm(dim=-1) / by_torch.norm(dim=-1)
    # a rounding that sends a token to another expert puts it and those after it far off
    assert float(errors.median()) < 0.1


@torch.inference_mode()
def test_a_correction_of_zeros_in_one_layer_is_one_all_the_same(tiny: Tiny) -> None:
    model = tree_of(tiny("minimax_m2").directory)
    layers: Any = model.tree.body.layers
    layers[0].mlp.e_score_correction_bias.zero_()
    decoder = promote(model, False)
    sums = []
    for layer in decoder.layers:
        assert isinstance(layer.mlp, Experts)
        assert layer.mlp.correction is not None
        sums.append(float(layer.mlp.correction.abs().sum()))
    assert [each > 0 for each in sums] == [False, True, True]


def _other_scale(layer: Any) -> None:
    layer.self_attn.scaling *= 2


def _other_eps(layer: Any) -> None:
    layer.input_layernorm.variance_epsilon = 1e-3


def _halved_residual(layer: Any) -> None:
    inner = layer.mlp.forward
    layer.mlp.forward = lambda x: 0.5 * inner(x)


def _far_window(layer: Any) -> None:
    inner = layer.self_attn.forward
    layer.self_attn.forward = lambda hidden_states, **named: inner(
        hidden_states=hidden_states.flip(1), **named
    )


def _more_weights(layer: Any) -> None:
    layer.extra = torch.nn.Linear(2, 2)


def _other_router(layer: Any) -> None:
    layer.mlp.gate.register_forward_pre_hook(lambda _module, args: (args[0].tanh(),))


def _scaled_experts(layer: Any) -> None:
    layer.mlp.experts.register_forward_hook(lambda _module, _args, out: 0.5 * out)


def _scaled_block(layer: Any) -> None:
    layer.mlp.register_forward_hook(lambda _module, _args, out: 0.5 * out)


def _other_shared(layer: Any) -> None:
    layer.mlp.shared_expert_gate.register_forward_hook(lambda _module, _args, out: 2 * out)


def _other_activation(layer: Any) -> None:
    layer.mlp.experts.act_fn = torch.nn.Softplus()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_other_router, "its router chooses in an unsupported way"),
        (_scaled_experts, "as a native layer it is "),
        (_scaled_block, "its shared expert is not simply added to the others"),
        (_other_shared, "its shared expert is not simply added to the others"),
        (_other_activation, ".*its activation is not supported for experts"),
        (_more_weights, "it has weights besides those of a plain layer"),
    ],
    ids=["router", "scaled", "block", "shared", "activation", "weights"],
)
@torch.inference_mode()
def test_a_tree_with_experts_of_another_kind_stays_a_tree(
    tiny: Tiny, change: Any, reason: str
) -> None:
    model = tree_of(tiny("qwen2_moe").directory)
    layers: Any = model.tree.body.layers
    change(layers[0])
    with pytest.raises(Unread, match=f"^layer 0: {reason}"):
        promote(model, False)
    assert not any(parameter.is_meta for parameter in model.tree.body.parameters())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_other_scale, "its layers differ in more than window, rope and MLP"),
        (_other_eps, "layer 1: its norms differ in eps"),
        (_halved_residual, "layer 1: it has no gated MLP"),
        (_more_weights, "layer 1: it has weights besides those of a plain layer"),
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


@torch.inference_mode()
def test_a_tree_that_stays_one_keeps_its_numbers(tiny: Tiny) -> None:
    model = tree_of(tiny("phi3").directory)
    layers: Any = model.tree.body.layers
    _more_weights(layers[1])
    before = [parameter.clone() for parameter in model.tree.body.parameters()]
    with pytest.raises(Unread, match=r"^layer 1: "):
        promote(model, False)
    after = list(model.tree.body.parameters())
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_bound_arguments_are_alike_only_where_they_are_plain() -> None:
    class Named:
        def __repr__(self) -> str:
            return "the same"

    def scaled(*_given: object, **_named: object) -> None: ...

    assert identity(partial(scaled, 2, by=0.5)) == identity(partial(scaled, 2, by=0.5))
    assert identity(partial(scaled, 2)) != identity(partial(scaled, 3))
    first, second = partial(scaled, Named()), partial(scaled, by=[Named()])
    assert identity(first) != identity(partial(scaled, Named()))
    assert identity(second) != identity(partial(scaled, by=[Named()]))
