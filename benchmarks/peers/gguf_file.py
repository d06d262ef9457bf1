"""A GGUF file of a checkpoint's weights, without a vocabulary: enough for llama.cpp's benchmark.

Layout, little-endian: "GGUF", version, counts; (key, type, value) of the metadata; (name,
dimensions, type, offset) of the tensors; their bytes, each on a multiple of 32. Matrices stay in
bfloat16, vectors become float32, as llama.cpp wants them. Rows of queries and keys are not permuted
to its order: with random weights that changes the answers only.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from tokenmesh.shared.tensor_file import TensorEntry, TensorFile

_VERSION: Final = 3
_ALIGNMENT: Final = 32
_UINT32, _FLOAT32, _STRING = 4, 6, 8
_F32, _BF16 = 0, 30

_NAMES: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ARCHITECTURES: Final = {"llama": "llama", "qwen2": "qwen2"}


def write_gguf(checkpoint: Path, target: Path) -> None:
    """From a folder with config.json and one bfloat16 model.safetensors.

    Raises KeyError for a model type or a tensor that is not known here.
    """
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    weights = TensorFile(checkpoint / "model.safetensors")
    names = list(weights)
    with target.open("wb") as out:
        metadata = [*_metadata(config)]
        out.write(b"GGUF" + struct.pack("<IQQ", _VERSION, len(names), len(metadata)))
        for key, kind, value in metadata:
            out.write(_string(key) + struct.pack("<I", kind) + value)
        offset = 0
        for name in names:
            out.write(_describe(name, weights[name], offset))
            offset += _padded(_size(weights[name]))
        out.write(bytes(-out.tell() % _ALIGNMENT))
        for name in names:
            _copy(weights, name, out)


def tensor_name(name: str) -> str:
    """llama.cpp's name for a tensor of a checkpoint. Raises KeyError."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{_NAMES[module]}.{kind}"
    number, _, part = module.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{_NAMES[part]}.{kind}"


def _metadata(config: dict[str, Any]) -> Iterator[tuple[str, int, bytes]]:
    """(key, type, value)."""
    name = _ARCHITECTURES[config["model_type"]]
    yield "general.architecture", _STRING, _string(name)
    yield "tokenizer.ggml.model", _STRING, _string("none")
    for key, value in (
        ("vocab_size", config["vocab_size"]),
        ("block_count", config["num_hidden_layers"]),
        ("context_length", config["max_position_embeddings"]),
        ("embedding_length", config["hidden_size"]),
        ("feed_forward_length", config["intermediate_size"]),
        ("attention.head_count", config["num_attention_heads"]),
        ("attention.head_count_kv", config["num_key_value_heads"]),
    ):
        yield f"{name}.{key}", _UINT32, struct.pack("<I", value)
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    for key, number in (
        ("attention.layer_norm_rms_epsilon", config["rms_norm_eps"]),
        ("rope.freq_base", theta),
    ):
        yield f"{name}.{key}", _FLOAT32, struct.pack("<f", number)


def _describe(name: str, entry: TensorEntry, offset: int) -> bytes:
    kind = _F32 if len(entry.shape) == 1 else _BF16
    dimensions = struct.pack(f"<I{len(entry.shape)}Q", len(entry.shape), *reversed(entry.shape))
    return _string(tensor_name(name)) + dimensions + struct.pack("<IQ", kind, offset)


def _copy(weights: TensorFile, name: str, out: BinaryIO) -> None:
    entry = weights[name]
    data = bytearray(entry.num_bytes)
    weights.read_into(name, memoryview(data))
    if len(entry.shape) == 1:
        wide = np.frombuffer(data, dtype="<u2").astype("<u4") << 16
        out.write(wide.astype("<u4").tobytes())
    else:
        out.write(data)
    out.write(bytes(-_size(entry) % _ALIGNMENT))


def _size(entry: TensorEntry) -> int:
    return entry.num_bytes * (2 if len(entry.shape) == 1 else 1)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
