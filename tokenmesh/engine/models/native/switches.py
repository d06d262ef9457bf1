"""The DecoderConfig fields that each family sets, read from its config.json."""

from typing import Any, Final

from tokenmesh.engine.models.native.config import QueryScaling
from tokenmesh.engine.models.native.read_rope import original_length, rope_parameters
from tokenmesh.engine.models.raw_config import RawConfig

MINISTRAL3_ROPE: Final = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def no_bias(raw: RawConfig) -> dict[str, Any]:
    """No biases and no norms on queries and keys."""
    return {}


def llama(raw: RawConfig) -> dict[str, Any]:
    bias = raw.flag("attention_bias")
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": raw.flag("mlp_bias")}


def qkv_bias(raw: RawConfig) -> dict[str, Any]:
    """A flagged bias on queries, keys and values only."""
    return {"qkv_bias": raw.flag("attention_bias")}


def qwen2(raw: RawConfig) -> dict[str, Any]:
    """A bias on queries, keys and values, always."""
    return {"qkv_bias": True}


def qwen3(raw: RawConfig) -> dict[str, Any]:
    """Norms on each head's queries and keys."""
    bias = raw.flag("attention_bias")
    return {"qkv_bias": bias, "out_bias": bias, "qk_norm": "head"}


def ministral3(raw: RawConfig) -> dict[str, Any]:
    """Queries that grow with the position."""
    rope = rope_parameters(raw)
    beta = rope.number("llama_4_scaling_beta", 0.0)
    if not beta:
        return {}
    return {"query_scaling": QueryScaling(beta=beta, period=original_length(raw, rope))}


def granite(raw: RawConfig) -> dict[str, Any]:
    return {
        **llama(raw),
        "attention_scale": raw.number("attention_multiplier", 1.0),
        "embedding_multiplier": raw.number("embedding_multiplier", 1.0),
        "multiplies_patches": True,
        "residual_multiplier": raw.number("residual_multiplier", 1.0),
        "logits_divisor": raw.number("logits_scaling", 1.0),
    }


def olmo(raw: RawConfig) -> dict[str, Any]:
    """Norms over all heads' queries, and over all keys."""
    bias = raw.flag("attention_bias")
    return {"qkv_bias": bias, "out_bias": bias, "qk_norm": "all"}


def seed_oss(raw: RawConfig) -> dict[str, Any]:
    """Separate flags for the two attention biases."""
    return {
        "qkv_bias": raw.flag("attention_bias"),
        "out_bias": raw.flag("attention_out_bias"),
        "mlp_bias": raw.flag("mlp_bias"),
    }


def hunyuan(raw: RawConfig) -> dict[str, Any]:
    """Norms on each head, after rope."""
    bias = raw.flag("attention_bias")
    return {"qkv_bias": bias, "out_bias": bias, "qk_norm": "head", "norms_after_rope": True}


def exaone4(raw: RawConfig) -> dict[str, Any]:
    """Norms on each head, no biases."""
    return {"qk_norm": "head"}


def gemma3(raw: RawConfig) -> dict[str, Any]:
    """Norms on each head, embeddings that grow with the width."""
    return {
        "qk_norm": "head",
        "attention_scale": raw.number("query_pre_attn_scalar") ** -0.5,
        "embedding_multiplier": raw.integer("hidden_size") ** 0.5,
    }
