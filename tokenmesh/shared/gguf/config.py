"""GgufValues of a GGUF file -> config.json."""

from typing import Any, Final

from tokenmesh.shared.gguf.architectures import Architecture, ExpertNames, Windows
from tokenmesh.shared.gguf.metadata import GgufValues, error
from tokenmesh.shared.gguf.rope import rope_parameters

_SOFTMAX: Final = 1
"""llama.cpp's number for the function that makes weights of a router's logits."""


def config_of(data: GgufValues, kind: Architecture) -> dict[str, Any]:
    """Raises CheckpointError for a key that is missing or not supported."""
    tensors = data.file.tensors
    hidden, heads = data.integer("embedding_length"), data.integer("attention.head_count")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise error(data.file, "tensor token_embd.weight is missing")
    inner = None if kind.experts is None else _inner_size(data)
    epsilon, epsilon_name = kind.epsilon
    config: dict[str, Any] = {
        "architectures": [kind.name],
        "model_type": kind.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": data.integer("block_count"),
        "intermediate_size": data.integer("feed_forward_length", inner),
        "num_attention_heads": heads,
        "num_key_value_heads": data.integer("attention.head_count_kv", heads),
        "head_dim": data.integer("attention.key_length", hidden // heads),
        epsilon_name: data.number(epsilon),
        "max_position_embeddings": data.integer("context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    if config["head_dim"] != data.integer("attention.value_length", config["head_dim"]):
        raise error(data.file, "keys and values differ in their length, which is not supported")
    config |= kind.fixed
    for key, (name, fallback) in kind.numbers.items():
        config[name] = data.number(key, fallback)
    for tensor, name in kind.present.items():
        config[name] = f"blk.0.{tensor}" in tensors
    if kind.adds_one:
        is_wide = config["num_hidden_layers"] == kind.wide_layers
        config["query_pre_attn_scalar"] = hidden // heads if is_wide else config["head_dim"]
    if kind.experts is not None:
        config |= _experts_config(data, kind.experts, config["num_hidden_layers"])
    config["rope_parameters"] = _rope(data, kind, config)
    if kind.windows is not None:
        config |= _windows_config(data, kind.windows, config)
    data.refuse_others()
    return config


def _rope(data: GgufValues, kind: Architecture, config: dict[str, Any]) -> dict[str, Any]:
    whole = config["head_dim"]
    rotated = data.integer("rope.dimension_count", whole)
    if rotated != whole and (not kind.may_turn_part or rotated > whole or rotated % 2):
        raise data.error("rope.dimension_count", f"is {rotated}, not that of a head")
    rope = rope_parameters(data, rotated, config["max_position_embeddings"])
    if rope["rope_type"] != "default":
        rope |= kind.rope
    if kind.may_turn_part:
        rope["partial_rotary_factor"] = rotated / whole
    if rope["rope_type"] == "longrope":
        key = "original_max_position_embeddings"
        config[key] = rope[key]
    return rope


def _windows_config(data: GgufValues, windows: Windows, config: dict[str, Any]) -> dict[str, Any]:
    """Also reads the rope of layers with a window."""
    size = data.get("attention.sliding_window", windows.size)
    if not size:
        data.get("attention.sliding_window_pattern")
        data.get("rope.freq_base_swa")
        rope, layers = config["rope_parameters"], config["num_hidden_layers"]
        if not windows.plain_rope or windows.name is not None:
            return {"sliding_window": None}
        both = {"full_attention": rope, "sliding_attention": rope}
        return {"layer_types": ["full_attention"] * layers, "rope_parameters": both}
    found: dict[str, Any] = {
        "sliding_window": data.integer("attention.sliding_window", windows.size)
    }
    if not windows.period:
        return found
    found["layer_types"] = _layer_types(data, windows.period, config["num_hidden_layers"])
    theta = config["rope_parameters"]["rope_theta"]
    own = data.number("rope.freq_base_swa", windows.theta or theta)
    if windows.plain_rope:
        plain = {"rope_type": "default", "rope_theta": own}
        full = config["rope_parameters"]
        found["rope_parameters"] = {"full_attention": full, "sliding_attention": plain}
    elif own != theta:
        raise data.error("rope.freq_base_swa", f"is {own}, which is not supported")
    if windows.name is not None:
        found["architectures"], found["model_type"] = [windows.name[0]], windows.name[1]
    return found


def _layer_types(data: GgufValues, period: int, layers: int) -> Any:
    key = "attention.sliding_window_pattern"
    has_window = data.each(key, layers)
    if has_window is None:
        period = data.integer(key, period)
        has_window = [layer % period < period - 1 for layer in range(layers)]
    return ["sliding_attention" if each else "full_attention" for each in has_window]


def _inner_size(data: GgufValues) -> int:
    """Numbers between the two products of an expert; older files leave the key out."""
    stack = data.file.tensors.get("blk.0.ffn_gate_exps.weight")
    of_stack = stack.shape[1] if stack is not None and len(stack.shape) == 3 else None
    return data.integer("expert_feed_forward_length", of_stack)


def _experts_config(data: GgufValues, experts: ExpertNames, layers: int) -> dict[str, Any]:
    """Raises CheckpointError for a key that is missing or not supported."""
    tensors = data.file.tensors
    gating = data.get("expert_gating_func", _SOFTMAX)
    if gating != _SOFTMAX:
        raise data.error("expert_gating_func", f"is {gating!r}; supported is {_SOFTMAX}")
    is_normalized = data.get("expert_weights_norm", experts.is_normalized)
    count, chosen = data.integer("expert_count"), data.integer("expert_used_count")
    if chosen > count:
        raise data.error("expert_used_count", f"is {chosen} of {count} experts")
    config: dict[str, Any] = {
        experts.count: count,
        "num_experts_per_tok": chosen,
        experts.size: _inner_size(data),
    }
    dense = [n for n in range(layers) if f"blk.{n}.ffn_gate_inp.weight" not in tensors]
    if dense and not experts.may_be_missing:
        raise error(data.file, f"layer {dense[0]} has no experts, which is not supported")
    if experts.states_norm:
        config["norm_topk_prob"] = bool(is_normalized)
    elif is_normalized != experts.is_normalized:
        raise data.error("expert_weights_norm", f"is {is_normalized!r}, which is not supported")
    if experts.may_be_missing:
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    shared = tensors.get("blk.0.ffn_gate_shexp.weight")
    if shared is not None:
        config["shared_expert_intermediate_size"] = data.integer(
            "expert_shared_feed_forward_length", shared.shape[0]
        )
    return config
