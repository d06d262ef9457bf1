"""FAMILIES: the architectures of the native kind and their differences.

Adding one that only differs by switches is an entry here and a configuration in the tests.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tokenmesh.engine.layers.mlp import Activation
from tokenmesh.engine.models.native import layer_patterns, switches
from tokenmesh.engine.models.native.config import LayerConfig, LayerNames
from tokenmesh.engine.models.native.read_rope import RopeRules
from tokenmesh.engine.models.raw_config import RawConfig

_PLAIN: Final = LayerNames()


@dataclass(frozen=True, slots=True)
class Family:
    names: LayerNames = _PLAIN
    switches: Callable[[RawConfig], dict[str, Any]] = switches.llama
    """Fields of DecoderConfig that depend on the family."""
    layers: Callable[[RawConfig, int], tuple[LayerConfig, ...]] = layer_patterns.full
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that config.json may leave out, as transformers has them."""
    rope: RopeRules = field(default_factory=RopeRules)
    interleaved_rope: bool = False
    """Its checkpoints pair feature 2i with 2i + 1 rather than i with i + half."""
    activation: Activation = "silu"
    adds_one: bool = False
    """It tells whether a norm multiplies by 1 plus its weight."""
    states_whole_length: bool = False
    """It tells whether max_position_embeddings is the length that scaling has stretched already."""
    rounds_multiplier: bool = False
    """It tells whether the embeddings' multiplier is rounded to their type."""


_FUSED: Final = LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
_SANDWICH: Final = LayerNames(
    gate_up=("mlp.gate_up_proj",),
    attention_post_norm="post_self_attn_layernorm",
    mlp_post_norm="post_mlp_layernorm",
)
_POST_NORM: Final = LayerNames(
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)
_PHI3_ROPE: Final = RopeRules(
    kinds={"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"},
    default_is_partial=True,
)
_HUNYUAN: Final = LayerNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")

FAMILIES: Final[Mapping[str, Family]] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(
        switches=switches.no_bias,
        layers=layer_patterns.window_by_type,
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "MinistralForCausalLM": Family(
        switches=switches.no_bias,
        layers=layer_patterns.window_by_type,
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "Ministral3ForCausalLM": Family(
        switches=switches.ministral3,
        layers=layer_patterns.window_everywhere,
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_parameters": switches.MINISTRAL3_ROPE,
        },
        rope=RopeRules(keys=frozenset({"llama_4_scaling_beta"})),
    ),
    "Qwen2ForCausalLM": Family(
        switches=switches.qwen2,
        layers=layer_patterns.window_when_used,
        defaults={"sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 32},
    ),
    "Qwen3ForCausalLM": Family(
        switches=switches.qwen3,
        layers=layer_patterns.window_when_used,
        defaults={
            "head_dim": 128,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "num_key_value_heads": 32,
        },
    ),
    "Phi3ForCausalLM": Family(
        names=_FUSED,
        switches=switches.no_bias,
        layers=layer_patterns.window_everywhere,
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        rope=_PHI3_ROPE,
    ),
    "SmolLM3ForCausalLM": Family(
        layers=layer_patterns.rope_interval,
        defaults={
            "num_key_value_heads": 4,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
        },
    ),
    "GraniteForCausalLM": Family(switches=switches.granite),
    "Olmo2ForCausalLM": Family(
        names=_POST_NORM, switches=switches.olmo, defaults={"rms_norm_eps": 1e-5}
    ),
    "Olmo3ForCausalLM": Family(
        names=_POST_NORM,
        switches=switches.olmo,
        layers=layer_patterns.rope_by_type,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500000.0},
        rope=RopeRules(by_type=True),
    ),
    "GlmForCausalLM": Family(
        names=LayerNames(gate_up=("mlp.gate_up_proj",)),
        switches=switches.qkv_bias,
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1.5625e-07,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
        rope=RopeRules(default_is_partial=True),
        interleaved_rope=True,
    ),
    "Glm4ForCausalLM": Family(
        names=_SANDWICH,
        switches=switches.qkv_bias,
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1.5625e-07,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
        rope=RopeRules(default_is_partial=True),
        interleaved_rope=True,
    ),
    "SeedOssForCausalLM": Family(
        switches=switches.seed_oss,
        defaults={"head_dim": 128, "num_key_value_heads": 8, "attention_bias": True},
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        names=_HUNYUAN,
        switches=switches.hunyuan,
        defaults={"rms_norm_eps": 1e-5},
        rope=RopeRules(keys=frozenset({"alpha"})),
    ),
    "Exaone4ForCausalLM": Family(
        names=_POST_NORM,
        switches=switches.exaone4,
        layers=layer_patterns.rope_where_sliding,
        defaults={
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
}


UNPACKED_FAMILIES: Final[Mapping[str, Family]] = {
    "Gemma3ForCausalLM": Family(
        names=LayerNames(
            attention_post_norm="post_attention_layernorm",
            mlp_norm="pre_feedforward_layernorm",
            mlp_post_norm="post_feedforward_layernorm",
        ),
        switches=switches.gemma3,
        layers=layer_patterns.rope_by_type,
        defaults={"rope_theta": 1000000.0},
        rope=RopeRules(by_type=True),
        activation="gelu_tanh",
        adds_one=True,
        states_whole_length=True,
        rounds_multiplier=True,
    ),
}
"""Architectures that are native where a GGUF file was unpacked: config.json is ours then, in one of
many forms that transformers takes. In all others they are of the general kind."""


@dataclass(frozen=True, slots=True)
class TextModel:
    """A language model inside a vision-language checkpoint."""

    architecture: str
    sizes: Mapping[str, int]
    """It holds what its text_config may leave out."""


def _text_model(architecture: str, *sizes: int) -> TextModel:
    names = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
    deep = {"num_hidden_layers": 32, "num_attention_heads": 32}
    return TextModel(architecture, {**dict(zip(names, sizes, strict=True)), **deep})


TEXT_MODELS: Final[Mapping[str, TextModel]] = {
    "llama": _text_model("LlamaForCausalLM", 32000, 4096, 11008, 2048),
    "mistral": _text_model("MistralForCausalLM", 32000, 4096, 14336, 131072),
    "qwen2": _text_model("Qwen2ForCausalLM", 151936, 4096, 22016, 32768),
    "qwen3": _text_model("Qwen3ForCausalLM", 151936, 4096, 22016, 32768),
}
"""Language models by text_config.model_type."""

IMAGE_ARCHITECTURES: Final = ("LlavaForConditionalGeneration",)
"""Checkpoints whose vision tower another service runs."""
