"""Promoted parts that a plain layer does not have; leaving one out is noticed."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tests.engine.test_promotion import assert_same_tokens, tree_of
from tests.fakes.engine_driver import EngineDriver
from tests.fakes.family_configs import SIZES, checkpoint_of
from tests.fakes.models import randomized
from tests.fakes.tiny import Tiny, TinyCheckpoint
from tests.ops.native import needs_native
from tokenmesh.engine.layers import mlp
from tokenmesh.engine.layers.step import Patch
from tokenmesh.engine.models.native import attention, build_program
from tokenmesh.engine.models.native.decoder import Decoder
from tokenmesh.engine.models.promotion.promote import promote
from tokenmesh.engine.models.promotion.read_heads import Unread
from tokenmesh.kernels.native import Kind, Op
from tokenmesh.kernels.paged_attention import PLAIN
from tokenmesh.kernels.silu_mul import silu_mul

GPT_OSS = {
    **SIZES,
    "sliding_window": 8,
    "attention_bias": True,
    "mlp_bias": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    },
}


class DenseMlp(torch.nn.Module):
    """Stands where gpt-oss has its experts."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = LlamaMLP(config)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.dense(x), None


@pytest.fixture
def with_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyCheckpoint:
    """gpt-oss's attention over dense MLPs."""
    monkeypatch.setattr(modeling_gpt_oss, "GptOssMLP", DenseMlp)

    def make() -> Any:
        return randomized(GptOssForCausalLM(GptOssConfig(**GPT_OSS)))

    make().save_pretrained(tmp_path)
    return TinyCheckpoint(tmp_path, make)


def decoder_of(directory: Path, *, native: bool = True) -> Decoder:
    driver = EngineDriver(directory, model_impl="transformers", native_kernels=native)
    model = driver.model.resident._model
    assert isinstance(model, Decoder)
    return model


def test_sinks_are_promoted(with_sinks: TinyCheckpoint, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert_same_tokens(with_sinks)
    assert "runs as a native decoder" in caplog.text
    decoder = decoder_of(with_sinks.directory)
    oracle = with_sinks.make_oracle()
    for layer, theirs in zip(decoder.layers, oracle.model.layers, strict=True):
        assert layer.attention.sinks is not None
        assert torch.equal(layer.attention.sinks, theirs.self_attn.sinks)


def test_the_switches_of_gemma2(tiny: Tiny) -> None:
    config = decoder_of(tiny("gemma2").directory).config
    assert (config.attention_softcap, config.logits_softcap) == (3.0, 8.0)
    assert (config.activation, config.multiplies_patches) == ("gelu_tanh", False)
    assert config.embedding_multiplier == 8.0
    assert config.attention_scale == pytest.approx(20**-0.5)
    assert [layer.window for layer in config.layers] == [16, None, 16, None]


def test_a_multiplier_of_the_table_does_not_scale_images(tiny: Tiny) -> None:
    decoder = decoder_of(tiny("gemma3_text").directory)
    image = torch.randn(2, decoder.facts.hidden_size)
    embedded = decoder.embed(torch.tensor([5, 6, 7, 8]), [Patch(slice(1, 3), image)])
    assert torch.equal(embedded[1:3], image)
    assert isinstance(decoder.embedding, torch.Tensor)
    assert torch.equal(embedded[[0, 3]], 8.0 * decoder.embedding[[5, 8]])


def test_in_bfloat16_norms_and_the_multiplier_are_those_of_the_tree(tmp_path: Path) -> None:
    sizes = {**SIZES, "hidden_size": 48, "model_type": "gemma3_text", "sliding_window": 8}
    config = {"architectures": ["Gemma3ForCausalLM"], **sizes}
    checkpoint = checkpoint_of(tmp_path / "model", config)
    model = tree_of(checkpoint.directory, torch.bfloat16)
    ids = torch.arange(SIZES["vocab_size"])
    with torch.inference_mode():
        expected = model.embed(ids)
        decoder = promote(model, False)
    layers: Any = model.tree.body.layers
    for ours, theirs in zip(decoder.layers, layers, strict=True):
        offset = theirs.post_feedforward_layernorm.weight
        # one more than the weight needs more digits than bfloat16 has
        assert ours.mlp_post_norm is not None
        assert torch.equal(ours.mlp_post_norm, 1 + offset.float())
        assert not torch.equal(ours.mlp_post_norm, (1 + offset).float())
    assert decoder.config.embedding_multiplier == 6.9375  # 48 ** 0.5 has no such short form
    assert torch.equal(decoder.embed(ids), expected)


def _without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let our layers leave out a part."""
    if name == "activation":
        monkeypatch.setattr(mlp, "activated", lambda gate_up, _activation: silu_mul(gate_up))
    else:
        monkeypatch.setattr(attention, "variant_of", lambda *_arguments: PLAIN)


@pytest.mark.parametrize(
    ("name", "part"),
    [("gemma2", "softcap"), ("gemma3_text", "activation"), ("gemma2", "activation")],
)
@torch.inference_mode()
def test_a_layer_without_its_part_is_not_proved(
    tiny: Tiny, name: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without(part, monkeypatch)
    with pytest.raises(Unread, match=r"as a native layer it is .* away from itself"):
        promote(tree_of(tiny(name).directory), False)


@torch.inference_mode()
def test_a_layer_without_its_sinks_is_not_proved(
    with_sinks: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without("sinks", monkeypatch)
    with pytest.raises(Unread, match=r"as a native layer it is .* away from itself"):
        promote(tree_of(with_sinks.directory), False)


def _program_without(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the program of C kernels leave out a part."""
    neutral: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": 0.0},
        "sinks": {"weight": None},
        "activation": {},
    }

    def op(*, kind: Kind, **fields: Any) -> Op:
        if kind == Kind.ATTENTION:
            fields |= neutral[part]
        if part == "activation" and kind == Kind.GELU_TANH_MUL:
            kind = Kind.SILU_MUL
        return Op(kind=kind, **fields)

    monkeypatch.setattr(build_program, "Op", op)


@needs_native
@pytest.mark.parametrize("part", ["softcap", "activation", "sinks"])
def test_a_program_without_a_part_is_not_served(
    tiny: Tiny,
    with_sinks: TinyCheckpoint,
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoint = with_sinks if part == "sinks" else tiny("gemma2")
    _program_without(part, monkeypatch)
    assert_same_tokens(checkpoint)
    assert "as a native decoder: in chunks and batched its logits are" in caplog.text


class DoubledSinks(modeling_gpt_oss.GptOssAttention):  # type: ignore[misc]
    """Attends with twice its weights."""

    @property
    def sinks(self) -> Any:
        return 2 * self._parameters["sinks"]


def _doubled_sinks(tree: Any) -> None:
    for layer in tree.body.layers:
        layer.self_attn.__class__ = DoubledSinks


class ScaledMlp(LlamaMLP):  # type: ignore[misc]
    """Multiplies its result by a buffer, which is 1 in the first layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.scale * super().forward(x)
        return scaled


def _scaled_layers(tree: Any) -> None:
    for number, layer in enumerate(tree.body.layers):
        layer.mlp.__class__ = ScaledMlp
        layer.mlp.register_buffer("scale", torch.tensor(1.0 + number))


def _other_softcap(tree: Any) -> None:
    tree.body.layers[1].self_attn.tokenmesh_port.softcap = 5.0


def _no_softcap(tree: Any) -> None:
    for layer in tree.body.layers:
        layer.self_attn.tokenmesh_port.softcap = 0.0


def _moved_rows(tree: Any) -> None:
    tree.embedding.forward = lambda ids: tree.embedding.weight[ids] + 1


def _scaled_body(tree: Any) -> None:
    inner = tree.body.forward
    tree.body.forward = lambda inputs_embeds, **named: inner(
        inputs_embeds=2 * inputs_embeds, **named
    )


def _bounded_logits(tree: Any) -> None:
    inner = tree.model.forward

    def forward(**named: Any) -> Any:
        out = inner(**named)
        out.logits = out.logits.clamp(-8, 8)
        return out

    tree.model.forward = forward


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("sinks", _doubled_sinks, "layer 0: its attention's sinks are not a weight for each head"),
        ("gemma2", _other_softcap, "its layers differ in more than window, rope and MLP"),
        ("gemma2", _no_softcap, "layer 0: its attention has a softcap of 0.0"),
        ("llama", _scaled_layers, "layer 0: it has weights besides those of a plain layer"),
        ("llama", _moved_rows, "its embedding is more than a table and a factor"),
        ("gemma3_text", _scaled_body, "its embeddings are multiplied twice"),
        ("llama", _bounded_logits, "its logits are not multiplied by one number"),
    ],
)
@torch.inference_mode()
def test_a_tree_with_a_part_that_is_not_known_stays_a_tree(
    tiny: Tiny, with_sinks: TinyCheckpoint, name: str, change: Any, reason: str
) -> None:
    model = tree_of((with_sinks if name == "sinks" else tiny(name)).directory)
    change(model.tree)
    with pytest.raises(Unread, match=f"^{reason}"):
        promote(model, False)
    assert not any(parameter.is_meta for parameter in model.tree.body.parameters())


@torch.inference_mode()
def test_a_norm_of_another_width_beside_the_layers_changes_nothing(tiny: Tiny) -> None:
    model = tree_of(tiny("llama").directory)
    body = model.tree.body
    body._modules = {"small": LlamaRMSNorm(8), **body._modules}
    norm = promote(model, False).norm
    assert norm is not None
    assert norm.shape == (model.facts.hidden_size,)


def test_an_activation_that_is_not_known_stays_in_the_tree(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {**SIZES, "model_type": "gemma2", "sliding_window": 8, "hidden_activation": "relu"}
    checkpoint = checkpoint_of(
        tmp_path / "model", {"architectures": ["Gemma2ForCausalLM"], **sizes}
    )
    with caplog.at_level(logging.INFO):
        assert_same_tokens(checkpoint)
    assert "stays a module tree: layer 0: its MLP's activation is relu" in caplog.text
