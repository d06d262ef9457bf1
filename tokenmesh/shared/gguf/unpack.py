"""A GGUF file as a directory that every service can read: made once, kept next to other caches.

Weights stay in their blocks, as bytes of safetensors. Blocks of queries and keys are put into the
order of transformers: a row is whole blocks, so that this moves bytes only.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from tokenmesh.shared.gguf.architectures import Architecture, architecture_of
from tokenmesh.shared.gguf.config import config_of
from tokenmesh.shared.gguf.joined import is_joined, joined
from tokenmesh.shared.gguf.metadata import GgufValues, error
from tokenmesh.shared.gguf.names import StoredTensor, stored_as
from tokenmesh.shared.gguf.reader import GgufFile, GgufTensor, part_paths
from tokenmesh.shared.gguf.rope import ROPE_TENSORS
from tokenmesh.shared.gguf.tokenizer import token_ids, tokenizer_of
from tokenmesh.shared.unpacked import MADE_BY, MadeTensor, Unpacking, write_objects, write_tensors

METHOD: Final = "gguf"
"""Its quant_method in config.json."""
_UNPACKING: Final = Unpacking("gguf", layout=4)
_PLAIN: Final = ("F32", "F16", "BF16")
_PIECE_BYTES: Final = 16 << 20


def is_gguf(path: Path) -> bool:
    """Return whether a path is a file whose name ends in .gguf; its contents are not read."""
    return path.is_file() and path.suffix == ".gguf"


def unpacked(path: Path, folder: str | None = None) -> Path:
    """The directory of a file, made unless it is there; blocks.

    Raises CheckpointError for a file that cannot be read or served.
    """
    return _UNPACKING.directory(
        path, part_paths(path), lambda target: _make(GgufFile.read(path), target), folder
    )


def _make(file: GgufFile, target: Path) -> None:
    data = GgufValues(file)
    kind = architecture_of(data)
    config = config_of(data, kind) | token_ids(file)
    names = {
        name: stored_as(data, kind, name)
        for name in file.tensors
        if name not in ROPE_TENSORS and not (kind.joins_experts and is_joined(name))
    }
    more = list(joined(data, config["num_hidden_layers"])) if kind.joins_experts else []
    types = {
        own.removesuffix(".weight"): file.tensors[name].type.name
        for name, stored in names.items()
        for own in stored.names
        if file.tensors[name].type.name not in _PLAIN
    }
    are_blocks = any(each.name.endswith("_blocks") for each in more)
    if types or are_blocks:
        config["quantization_config"] = {"quant_method": METHOD, "types": types}
    if are_blocks:
        config["quantization_config"]["experts"] = "mxfp4"
    whole, tokenizer_config = tokenizer_of(file)
    write_objects(
        target,
        {
            "config.json": config,
            "tokenizer.json": whole,
            "tokenizer_config.json": tokenizer_config | MADE_BY,
        },
    )
    stored = (
        each for name, own in names.items() for each in _stored(file, kind, name, own, config)
    )
    write_tensors(target, [*stored, *more])


def _stored(
    file: GgufFile, kind: Architecture, name: str, stored: StoredTensor, config: dict[str, Any]
) -> Iterator[MadeTensor]:
    """A tensor of the file under its own names: experts lie one after the other."""
    tensor = file.tensors[name]
    shape, dtype = stored.shape, tensor.type.name
    if dtype not in _PLAIN:
        if len(shape) != 2 or not name.endswith(".weight"):
            raise error(file, f"tensor {name} is of type {dtype}, and is not a matrix")
        shape, dtype = (shape[0], tensor.row_bytes), "U8"
    size = tensor.num_bytes // len(stored.names)
    for number, own in enumerate(stored.names):
        pieces = partial(_pieces, file, kind, name, config, number * size, size)
        yield MadeTensor(own, dtype, shape, pieces)


def _pieces(
    file: GgufFile, kind: Architecture, name: str, config: dict[str, Any], start: int, size: int
) -> Iterator[bytes]:
    """Bytes of a tensor in the order of transformers."""
    tensor = file.tensors[name]
    part = name.split(".")[-2]
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(part)
    with tensor.path.open("rb") as source:
        source.seek(tensor.offset + start)
        if heads is not None and kind.is_permuted:
            yield _by_halves(file, name, tensor, source.read(size), config[heads])
            return
        if kind.adds_one and part.endswith("norm"):
            yield _less_one(file, name, tensor, source.read(size))
            return
        while size > 0:
            piece = source.read(min(size, _PIECE_BYTES))
            if not piece:
                raise error(file, f"tensor {name} ends early; is the file complete?")
            size -= len(piece)
            yield piece


def _by_halves(file: GgufFile, name: str, tensor: GgufTensor, content: bytes, heads: int) -> bytes:
    """Rows (pair, half) of each head -> rows (half, pair)."""
    import numpy as np

    rows = tensor.shape[0]
    if rows % (2 * heads) or len(content) != tensor.num_bytes:
        raise error(file, f"tensor {name} has {rows} rows, which {heads} heads do not divide")
    row_bytes = tensor.num_bytes // rows
    by_pair = np.frombuffer(content, np.uint8).reshape(heads, rows // heads // 2, 2, row_bytes)
    return by_pair.swapaxes(1, 2).tobytes()


def _less_one(file: GgufFile, name: str, tensor: GgufTensor, content: bytes) -> bytes:
    """Norms that are stored as 1 plus the weight -> the weight."""
    import numpy as np

    if tensor.type.name != "F32" or len(content) != tensor.num_bytes:
        raise error(file, f"tensor {name} is of type {tensor.type.name}, not F32")
    return (np.frombuffer(content, "<f4") - np.float32(1)).tobytes()
