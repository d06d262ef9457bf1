"""A tiny checkpoint of any architecture that transformers generates text with, as far as its
config class takes the usual names of sizes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from tests.fakes.models import randomized

MAX_PARAMETERS: Final = 3_000_000
"""Sizes that a config class does not take leave a model at its full size."""
NUM_LAYERS: Final = 4

_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 160,
    "vocab_size_per_layer_input": 160,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "sliding_window": 16,
    "attention_chunk_size": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 48,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 64,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 2,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 128,
    "mamba_expand": 2,
    "mamba_dt_rank": 8,
    "ssm_state_size": 16,
    "state_size": 16,
    "n_groups": 1,
    "num_heads": 8,
    "expand": 2,
    "chunk_size": 16,
    "ffn_dim": 80,
    "ffn_hidden_size": 80,
    "word_embed_proj_dim": 64,
    "hidden_size_per_layer_input": 16,
    "rotary_dim": 8,
    "lru_width": 64,
    "embedding_multiplier": 2.7,
    "embedding_scale": 2.7,
    "scale_embedding": True,
}


class CannotMake(Exception):
    """transformers makes or runs no such tiny model; nothing is said about us."""


def kinds() -> dict[str, type]:
    """Config class of each model type that transformers generates text with."""
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return {config.model_type: config for config in mapping}


def make_checkpoint(directory: Path, config_class: type) -> Any:
    """Save a tiny checkpoint; its model, in float32. Raises CannotMake."""
    try:
        torch.manual_seed(0)
        config = _tiny(config_class)
        kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
        kind = kind[0] if isinstance(kind, tuple) else kind
        with torch.device("meta"):
            size = sum(p.numel() for p in kind._from_config(_tiny(config_class)).parameters())
        if size > MAX_PARAMETERS:
            raise CannotMake(f"{size / 1e6:.0f} million parameters")
        model = randomized(kind._from_config(config, attn_implementation="eager"))
        with torch.no_grad():
            logits = model(torch.tensor([[5, 6, 7]]), use_cache=False).logits
        if not logits.isfinite().all():
            raise CannotMake("logits that are not finite")
        model.save_pretrained(directory)
        transformers.AutoConfig.from_pretrained(directory)
    except CannotMake:
        raise
    except Exception as error:
        raise CannotMake(f"{type(error).__name__}: {error}") from error
    return model


def _tiny(config_class: type) -> Any:
    default: Any = config_class()
    if getattr(default, "text_config", None) is not None:
        text = _sizes_of(type(default.text_config)())
        return config_class(text_config=text)
    return config_class(**_sizes_of(default))


def _sizes_of(default: Any) -> dict[str, Any]:
    """Those sizes that a config class knows, and its lists by layer cut to the layers."""
    sizes = {key: value for key, value in _SIZES.items() if _takes(default, key)}
    if "kv_lora_rank" in sizes:
        sizes |= {"num_key_value_heads": 4, "head_dim": 8}
    for key, value in default.to_dict().items():
        if isinstance(value, list) and len(value) == getattr(default, "num_hidden_layers", 0):
            sizes[key] = value[:NUM_LAYERS]
    return sizes


def _takes(default: Any, key: str) -> bool:
    if isinstance(getattr(type(default), key, None), property):
        return False
    try:
        return hasattr(default, key)
    except Exception:  # some refuse to say what differs by layer
        return False
