"""config.json -> NativeFacts: which architecture, which switches, where its tensors are."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenmesh.engine.api.media import IMAGE
from tokenmesh.engine.layers.mlp import Activation
from tokenmesh.engine.media_facts import TEXT_ONLY, MediaFacts
from tokenmesh.engine.models.api import ModelFacts, heads_problem
from tokenmesh.engine.models.extra_layers import extra_layers
from tokenmesh.engine.models.native.config import (
    DecoderConfig,
    Names,
)
from tokenmesh.engine.models.native.read_rope import longest_position, read_ropes
from tokenmesh.engine.models.native.registry import (
    FAMILIES,
    IMAGE_ARCHITECTURES,
    TEXT_MODELS,
    UNPACKED_FAMILIES,
    Family,
)
from tokenmesh.engine.models.quantization import read_quantization
from tokenmesh.engine.models.raw_config import (
    REFUSED_IN_CONFIG,
    RawConfig,
    architecture_of,
    refuse_keys,
)
from tokenmesh.shared.gguf.unpack import METHOD as GGUF

_ACTIVATIONS: Final[Mapping[Activation, tuple[str, ...]]] = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh",),
}


@dataclass(frozen=True, slots=True)
class NativeFacts(ModelFacts):
    """ModelFacts with what the native kind also needs."""

    family: Family
    config: DecoderConfig
    names: tuple[Names, ...]
    """Candidates: the one whose embedding the checkpoint holds applies."""

    def gpu_problem(self) -> str | None:
        return heads_problem(self.config.head_dim)


def is_native(raw: RawConfig) -> bool:
    """Return whether the architecture is one of ours, with the activation that ours has."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    has_silu = (raw.get("hidden_act") or "silu") in _ACTIVATIONS["silu"]
    if name in UNPACKED_FAMILIES:
        return _is_unpacked(raw)
    return (name in FAMILIES and has_silu) or name in IMAGE_ARCHITECTURES


def _is_unpacked(raw: RawConfig) -> bool:
    quantized = raw.get("quantization_config")
    return isinstance(quantized, dict) and quantized.get("quant_method") == GGUF


def read_facts(raw: RawConfig) -> NativeFacts:
    """Read a whole config.json. Raises CheckpointError that names the key at fault."""
    architecture = _architecture(raw)
    quantization = read_quantization(raw)
    takes_images = architecture in IMAGE_ARCHITECTURES
    if takes_images:
        text, family = _text_model(raw)
    else:
        text, family = raw, FAMILIES.get(architecture) or UNPACKED_FAMILIES[architecture]
        text = text.with_defaults(family.defaults)
    config = _decoder_config(text, family)
    if takes_images:
        tied = raw.flag("tie_word_embeddings") or config.tied_embeddings
        config = dataclasses.replace(config, tied_embeddings=tied)
    for part in (text, raw):
        refuse_keys(part, REFUSED_IN_CONFIG)
    dtype = raw.get("dtype") or raw.get("torch_dtype") or text.get("dtype")
    return NativeFacts(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_position=config.max_position,
        ropes=config.ropes,
        family=family,
        config=config,
        names=_VISION_NAMES if takes_images else (Names(),),
        media=MediaFacts(frozenset({IMAGE})) if takes_images else TEXT_ONLY,
        dtype=dtype if isinstance(dtype, str) else None,
        quantization=quantization,
        extra_layers=extra_layers(raw, len(config.layers)),
    )


_TOWERS = ("vision_tower.", "multi_modal_projector.")
_VISION_NAMES = (
    Names(model="language_model.model.", head="language_model.lm_head.", ignored=_TOWERS),
    Names(
        model="model.language_model.",
        head="lm_head.",
        ignored=tuple(f"model.{tower}" for tower in _TOWERS),
    ),
)


def _architecture(raw: RawConfig) -> str:
    name = architecture_of(raw)
    if name in UNPACKED_FAMILIES and _is_unpacked(raw):
        return name
    if name not in FAMILIES and name not in IMAGE_ARCHITECTURES:
        supported = ", ".join([*FAMILIES, *IMAGE_ARCHITECTURES])
        raise raw.error("architectures", f"names {name}, which is not supported; {supported} are")
    return name


def _text_model(raw: RawConfig) -> tuple[RawConfig, Family]:
    """The language model of a vision-language checkpoint, which may leave out nearly everything."""
    text = raw.part("text_config")
    if text is None:
        raise raw.error("text_config", "is missing")
    kind = text.get("model_type") or "llama"
    model = TEXT_MODELS.get(kind)
    if model is None:
        supported = ", ".join(TEXT_MODELS)
        raise text.error("model_type", f"is {kind!r}; supported are {supported}")
    if kind == "mistral" and text.get("layer_types") is not None:
        raise text.error("layer_types", "is set, which transformers ignores in a vision model")
    family = FAMILIES[model.architecture]
    return text.with_defaults({**model.sizes, **family.defaults}), family


def _decoder_config(raw: RawConfig, family: Family) -> DecoderConfig:
    activation = raw.get("hidden_act") or "silu"
    if activation not in _ACTIVATIONS[family.activation]:
        supported = _ACTIVATIONS[family.activation][0]
        raise raw.error("hidden_act", f"is {activation!r}; supported is {supported}")
    hidden_size = raw.integer("hidden_size")
    num_heads = raw.integer("num_attention_heads")
    num_kv_heads = raw.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise raw.error("num_key_value_heads", f"is {num_kv_heads}, no divisor of {num_heads}")
    head_dim = raw.integer("head_dim", hidden_size // num_heads)
    ropes = read_ropes(raw, family.rope, head_dim)
    switches: dict[str, Any] = {"attention_scale": head_dim**-0.5, **family.switches(raw)}
    return DecoderConfig(
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=raw.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
        layers=family.layers(raw, raw.integer("num_hidden_layers")),
        ropes=ropes,
        max_position=ropes[0].max_position
        if family.states_whole_length
        else longest_position(ropes[0]),
        tied_embeddings=raw.flag("tie_word_embeddings"),
        activation=family.activation,
        **switches,
    )
