"""GGUF files of tiny checkpoints, written from what is published of the format."""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file

Encoded = tuple[int, bytes, torch.Tensor]
"""Number of the type, bytes, and the numbers that they stand for."""

_NAMES: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ENDS: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def plain(weight: torch.Tensor) -> Encoded:
    return 0, weight.float().numpy().tobytes(), weight.float()


def half(weight: torch.Tensor) -> Encoded:
    return 1, weight.half().numpy().tobytes(), weight.half().float()


def brain(weight: torch.Tensor) -> Encoded:
    rounded = weight.bfloat16()
    return 30, rounded.view(torch.int16).numpy().tobytes(), rounded.float()


def q8_0(weight: torch.Tensor) -> Encoded:
    blocks = weight.float().view(*weight.shape[:-1], -1, 32)
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    numbers = (blocks / scales.float().clamp_min(1e-8)).round().to(torch.int8)
    content = torch.cat((scales.view(torch.uint8), numbers.view(torch.uint8)), -1)
    return 8, content.numpy().tobytes(), (numbers * scales.float()).view(weight.shape)


def q4_0(weight: torch.Tensor) -> Encoded:
    blocks = weight.float().view(*weight.shape[:-1], -1, 32)
    scales = (blocks.abs().amax(-1, keepdim=True) / 7).half()
    numbers = (blocks / scales.float().clamp_min(1e-8)).round().clamp(-8, 7)
    codes = (numbers + 8).to(torch.uint8)
    content = torch.cat((scales.view(torch.uint8), codes[..., :16] | (codes[..., 16:] << 4)), -1)
    return 2, content.numpy().tobytes(), (numbers * scales.float()).view(weight.shape)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(given: Any) -> bytes:
    """Type and content of a metadata value."""
    match given:
        case bool():
            return struct.pack("<I?", 7, given)
        case int():
            return struct.pack("<II", 4, given)
        case float():
            return struct.pack("<If", 6, given)
        case str():
            return struct.pack("<I", 8) + string(given)
        case [str(), *_]:
            items = b"".join(string(each) for each in given)
            return struct.pack("<IIQ", 9, 8, len(given)) + items
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(given)}f", 9, 6, len(given), *given)
        case _:
            return struct.pack(f"<IIQ{len(given)}i", 9, 5, len(given), *given)


def write(
    path: Path, values: Mapping[str, Any], tensors: Mapping[str, tuple[Any, Encoded]]
) -> None:
    """tensors: shape, as torch has it, and content by name."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    for key, given in values.items():
        head += string(key) + value(given)
    content = b""
    for name, (shape, (kind, data, _)) in tensors.items():
        head += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", kind, len(content))
        content += data + b"\0" * (-len(data) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + content)


def gguf_name(name: str) -> str:
    """The name of one of transformers' tensors."""
    stem, _, leaf = name.rpartition(".")
    if stem in _ENDS:
        return f"{_ENDS[stem]}.{leaf}"
    _, _, number, part = stem.split(".", 3)
    return f"blk.{number}.{_NAMES[part]}.{leaf}"


def by_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows (half, pair) of each head -> rows (pair, half)."""
    parts = weight.view(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return parts.transpose(1, 2).reshape(weight.shape)


def metadata(arch: str, config: Mapping[str, Any], tokens: Mapping[str, Any]) -> dict[str, Any]:
    values = {
        "general.architecture": arch,
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
    }
    if config.get("head_dim"):
        values[f"{arch}.attention.key_length"] = config["head_dim"]
        values[f"{arch}.attention.value_length"] = config["head_dim"]
    return {**values, **tokens}


def write_model(
    source: Path,
    path: Path,
    arch: str,
    encode: Callable[[str, torch.Tensor], Encoded],
    tokens: Mapping[str, Any],
) -> dict[str, torch.Tensor]:
    """A checkpoint of transformers as GGUF; the numbers that its tensors stand for."""
    config = json.loads((source / "config.json").read_text())
    stored, stands_for = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        encoded = encode(name, weight) if weight.ndim == 2 else plain(weight)
        stands_for[name] = encoded[2]
        heads = {"q": "num_attention_heads", "k": "num_key_value_heads"}
        which = name.rpartition("_proj")[0].rpartition(".")[2]
        if arch == "llama" and which in heads:
            encoded = encode(name, by_pairs(weight, config[heads[which]]))
        stored[gguf_name(name)] = (weight.shape, encoded)
    write(path, metadata(arch, config, tokens), stored)
    return stands_for
