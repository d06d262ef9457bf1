"""Metadata of a GGUF file -> config.json and the names of its tensors, by architecture."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.gguf.reader import GgufFile


@dataclass(frozen=True, slots=True)
class Architecture:
    """What differs from one architecture to the next."""

    name: str
    """In config.json."""
    model_type: str
    is_permuted: bool = False
    """Rows of queries and keys are in the order of pairs, not of halves."""


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("LlamaForCausalLM", "llama", is_permuted=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
}
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
ROPE_FACTORS: Final = "rope_freqs.weight"
"""Factors of llama3's rope, which config.json states by its parameters."""


def architecture_of(file: GgufFile) -> Architecture:
    """Raises CheckpointError for one that is not served."""
    name = file.values.get("general.architecture")
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(ARCHITECTURES)
        raise error(file, f"general.architecture is {name!r}; supported are {known}")
    for key in ("expert_count", "attention.sliding_window"):
        if file.values.get(f"{name}.{key}"):
            raise error(file, f"{name}.{key} is set, which is not supported")
    return found


def tensor_name(file: GgufFile, name: str) -> str:
    """The name of a tensor in a checkpoint of transformers. Raises CheckpointError."""
    stem, _, leaf = name.rpartition(".")
    found = _ENDS.get(stem)
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _IN_LAYER:
        found = f"model.layers.{int(parts[1])}.{_IN_LAYER[parts[2]]}"
    if found is None or leaf not in ("weight", "bias"):
        raise error(file, f"tensor {name} is not known")
    return f"{found}.{leaf}"


def config_of(file: GgufFile) -> dict[str, Any]:
    """A config.json. Raises CheckpointError for a key that is missing or not supported."""
    kind = architecture_of(file)
    hidden, heads = _integer(file, "embedding_length"), _integer(file, "attention.head_count")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise error(file, "tensor token_embd.weight is missing")
    config: dict[str, Any] = {
        "architectures": [kind.name],
        "model_type": kind.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": _integer(file, "block_count"),
        "intermediate_size": _integer(file, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _integer(file, "attention.head_count_kv", heads),
        "head_dim": _integer(file, "attention.key_length", hidden // heads),
        "rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _number(file, "rope.freq_base", 10000.0),
        "max_position_embeddings": _integer(file, "context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    if config["head_dim"] != _integer(file, "attention.value_length", config["head_dim"]):
        raise error(file, "keys and values differ in their length, which is not supported")
    for name in ("bos", "eos"):
        token = file.values.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None:
            config[f"{name}_token_id"] = token
    scaling = _rope_scaling(file, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _rope_scaling(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Raises CheckpointError for a kind that is not known."""
    prefix = f"{file.values['general.architecture']}.rope."
    rotated = file.values.get(f"{prefix}dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        raise error(file, f"{prefix}dimension_count is {rotated}, not that of a head")
    kind = file.values.get(f"{prefix}scaling.type")
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, config)
    factor = file.values.get(f"{prefix}scaling.factor")
    if kind in (None, "none"):
        return None
    if not isinstance(factor, int | float) or not factor > 0:
        raise error(file, f"{prefix}scaling.factor is {factor!r}")
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn":
        length = file.values.get(f"{prefix}scaling.original_context_length")
        if not isinstance(length, int):
            raise error(file, f"{prefix}scaling.original_context_length is {length!r}")
        scaling = {"rope_type": "yarn", "factor": float(factor)}
        return scaling | {"original_max_position_embeddings": length}
    raise error(file, f"{prefix}scaling.type is {kind!r}; supported are linear and yarn")


_LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_LENGTH: Final = 8192
_LLAMA3_FACTORS: Final = (8.0, 32.0)
"""As all of its family have them."""


def _llama3_scaling(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np

    tensor = file.tensors[ROPE_FACTORS]
    pairs = config["head_dim"] // 2
    if tensor.type.name != "F32" or tensor.shape != (pairs,):
        raise error(file, f"tensor {ROPE_FACTORS} has shape {list(tensor.shape)}")
    with file.path.open("rb") as opened:
        opened.seek(tensor.offset)
        found = np.frombuffer(opened.read(tensor.num_bytes), dtype="<f4")
    waves = 2 * np.pi * config["rope_theta"] ** (np.arange(pairs) / pairs)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = ((_LLAMA3_LENGTH / waves - low) / (high - low)).clip(0, 1)
    for factor in _LLAMA3_FACTORS:
        expected = 1 / ((1 - smooth) / factor + smooth)
        if found.shape == expected.shape and np.allclose(found, expected, rtol=1e-4):
            length = {"original_max_position_embeddings": _LLAMA3_LENGTH}
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3, **length}
    raise error(file, f"tensor {ROPE_FACTORS} has factors that no known rope has")


def _integer(file: GgufFile, key: str, fallback: int | None = None) -> int:
    whole, value = _looked_up(file, key, fallback)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
        raise error(file, f"{whole} is {value!r}, not a whole number above 0")
    return value


def _number(file: GgufFile, key: str, fallback: float | None = None) -> float:
    whole, value = _looked_up(file, key, fallback)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise error(file, f"{whole} is {value!r}, not a number above 0")
    return float(value)


def _looked_up(file: GgufFile, key: str, fallback: object) -> tuple[str, object]:
    whole = f"{file.values['general.architecture']}.{key}"
    value = file.values.get(whole)
    return whole, fallback if value is None else value


def error(file: GgufFile, problem: str) -> CheckpointError:
    """An error that names the file."""
    return CheckpointError(f"{file.path}: {problem}", param="model")
