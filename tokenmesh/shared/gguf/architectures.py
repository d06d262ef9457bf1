"""Metadata of a GGUF file -> config.json and the names of its tensors, by architecture."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenmesh.shared.gguf.metadata import error, integer, number
from tokenmesh.shared.gguf.reader import GgufFile
from tokenmesh.shared.gguf.rope import rope_scaling


@dataclass(frozen=True, slots=True)
class Architecture:
    """What differs from one architecture to the next."""

    name: str
    """In config.json."""
    model_type: str
    is_permuted: bool = False
    """Rows of queries and keys are in the order of pairs, not of halves."""
    experts: "ExpertNames | None" = None


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Where a layer's experts are, and how config.json describes them."""

    block: str
    """The module around them."""
    gate_up_down: tuple[str, str, str]
    """The weights of one expert."""
    count: str
    """The key of config.json for their number."""
    is_normalized: bool
    """The weights of a token's experts add up to 1."""
    states_norm: bool
    """config.json has norm_topk_prob; else it is fixed."""


_QWEN_PARTS: Final = ("gate_proj", "up_proj", "down_proj")
ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("LlamaForCausalLM", "llama", is_permuted=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        experts=ExpertNames("mlp", _QWEN_PARTS, "num_experts", False, True),
    ),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        experts=ExpertNames("mlp", _QWEN_PARTS, "num_experts", True, True),
    ),
}
_MIXTRAL: Final = Architecture(
    "MixtralForCausalLM",
    "mixtral",
    is_permuted=True,
    experts=ExpertNames("block_sparse_moe", ("w1", "w3", "w2"), "num_local_experts", True, False),
)
"""What llama is called with experts."""
_ENDS: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_STACKS: Final = {"ffn_gate_exps": 0, "ffn_up_exps": 1, "ffn_down_exps": 2}
"""Weights of all experts [E, outputs, inputs], and which of `ExpertNames.gate_up_down` they are."""
_IN_BLOCK: Final = {
    "ffn_gate_inp": "gate",
    "ffn_gate_inp_shexp": "shared_expert_gate",
    "ffn_gate_shexp": "shared_expert.gate_proj",
    "ffn_up_shexp": "shared_expert.up_proj",
    "ffn_down_shexp": "shared_expert.down_proj",
}
"""The router and the shared expert."""
MAX_EXPERTS: Final = 4096
"""Of a layer; each becomes several tensors."""
_SHARED_GATE: Final = "ffn_gate_inp_shexp"
"""A vector here, a matrix of one row in transformers."""
_SOFTMAX: Final = 1
"""How llama.cpp numbers the function that makes weights of a router's logits."""


def architecture_of(file: GgufFile) -> Architecture:
    """Raises CheckpointError for one that is not served."""
    name = file.values.get("general.architecture")
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(ARCHITECTURES)
        raise error(file, f"general.architecture is {name!r}; supported are {known}")
    if name == "llama" and file.values.get("llama.expert_count"):
        found = _MIXTRAL
    refused = ["attention.sliding_window", "expert_group_count", "leading_dense_block_count"]
    for key in refused if found.experts else ("attention.sliding_window", "expert_count"):
        value = file.values.get(f"{name}.{key}")
        if value and (key, value) != ("expert_group_count", 1):
            raise error(file, f"{name}.{key} is set, which is not supported")
    return found


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a tensor becomes in a checkpoint of transformers."""

    names: tuple[str, ...]
    """One; of a stack of experts one for each."""
    shape: tuple[int, ...]
    """Of each."""


def stored_as(file: GgufFile, name: str) -> StoredTensor:
    """Raises CheckpointError for a tensor that is not known, or not shaped as its name says."""
    kind, shape = architecture_of(file), file.tensors[name].shape
    stem, _, leaf = name.rpartition(".")
    parts = stem.split(".")
    is_inside = len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit()
    layer, part = (f"model.layers.{int(parts[1])}", parts[2]) if is_inside else ("", stem)
    found = _ENDS.get(stem)
    if is_inside and part in _IN_LAYER:
        found = f"{layer}.{_IN_LAYER[part]}"
    if kind.experts is not None and layer and leaf == "weight":
        within = f"{layer}.{kind.experts.block}"
        if part in _STACKS:
            count = integer(file, "expert_count")
            if len(shape) != 3 or shape[0] != count or count > MAX_EXPERTS:
                raise error(file, f"tensor {name} has shape {list(shape)} for {count} experts")
            own = kind.experts.gate_up_down[_STACKS[part]]
            stacked = (f"{within}.experts.{expert}.{own}.weight" for expert in range(count))
            return StoredTensor(tuple(stacked), shape[1:])
        if part in _IN_BLOCK:
            found = f"{within}.{_IN_BLOCK[part]}"
            shape = (1, *shape) if part == _SHARED_GATE and len(shape) == 1 else shape
    if found is None or leaf not in ("weight", "bias"):
        raise error(file, f"tensor {name} is not known")
    return StoredTensor((f"{found}.{leaf}",), shape)


def config_of(file: GgufFile) -> dict[str, Any]:
    """A config.json. Raises CheckpointError for a key that is missing or not supported."""
    kind = architecture_of(file)
    hidden, heads = integer(file, "embedding_length"), integer(file, "attention.head_count")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise error(file, "tensor token_embd.weight is missing")
    config: dict[str, Any] = {
        "architectures": [kind.name],
        "model_type": kind.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": integer(file, "block_count"),
        "intermediate_size": integer(
            file, "feed_forward_length", None if kind.experts is None else _inner_size(file)
        ),
        "num_attention_heads": heads,
        "num_key_value_heads": integer(file, "attention.head_count_kv", heads),
        "head_dim": integer(file, "attention.key_length", hidden // heads),
        "rms_norm_eps": number(file, "attention.layer_norm_rms_epsilon"),
        "rope_theta": number(file, "rope.freq_base", 10000.0),
        "max_position_embeddings": integer(file, "context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    if config["head_dim"] != integer(file, "attention.value_length", config["head_dim"]):
        raise error(file, "keys and values differ in their length, which is not supported")
    for name in ("bos", "eos"):
        token = file.values.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None:
            config[f"{name}_token_id"] = token
    scaling = rope_scaling(file, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    if kind.experts is not None:
        config |= _experts_config(file, kind.experts, config["num_hidden_layers"])
    return config


def _inner_size(file: GgufFile) -> int:
    """Numbers between the two products of an expert; older files leave the key out."""
    stack = file.tensors.get("blk.0.ffn_gate_exps.weight")
    of_stack = stack.shape[1] if stack is not None and len(stack.shape) == 3 else None
    return integer(file, "expert_feed_forward_length", of_stack)


def _experts_config(file: GgufFile, names: ExpertNames, layers: int) -> dict[str, Any]:
    """Raises CheckpointError for a key that is missing or not supported."""
    prefix = file.values["general.architecture"]
    gating = file.values.get(f"{prefix}.expert_gating_func")
    if gating not in (None, _SOFTMAX):
        raise error(file, f"{prefix}.expert_gating_func is {gating!r}; supported is {_SOFTMAX}")
    scale = file.values.get(f"{prefix}.expert_weights_scale")
    if scale not in (None, 0.0, 1.0):
        raise error(file, f"{prefix}.expert_weights_scale is {scale!r}, which is not supported")
    is_normalized = file.values.get(f"{prefix}.expert_weights_norm", names.is_normalized)
    count, chosen = integer(file, "expert_count"), integer(file, "expert_used_count")
    if chosen > count:
        raise error(file, f"{prefix}.expert_used_count is {chosen} of {count} experts")
    config: dict[str, Any] = {names.count: count, "num_experts_per_tok": chosen}
    dense = [n for n in range(layers) if f"blk.{n}.ffn_gate_inp.weight" not in file.tensors]
    if not names.states_norm:
        if is_normalized != names.is_normalized:
            raise error(file, f"{prefix}.expert_weights_norm is {is_normalized!r}")
        if dense:
            raise error(file, f"layer {dense[0]} has no experts, which is not supported")
        return config | {"intermediate_size": _inner_size(file)}
    config |= {
        "moe_intermediate_size": _inner_size(file),
        "norm_topk_prob": bool(is_normalized),
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }
    shared = file.tensors.get("blk.0.ffn_gate_shexp.weight")
    if shared is not None:
        config["shared_expert_intermediate_size"] = integer(
            file, "expert_shared_feed_forward_length", shared.shape[0]
        )
    return config
