"""A GGUF file as a directory that every service can read: made once, kept next to other caches.

Weights stay in their blocks, as bytes of safetensors. Blocks of queries and keys are put into the
order of transformers: a row is whole blocks, so that this moves bytes only.
"""

import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.gguf.architectures import Architecture, architecture_of
from tokenmesh.shared.gguf.config import config_of
from tokenmesh.shared.gguf.joined import MadeTensor, is_joined, joined
from tokenmesh.shared.gguf.metadata import GgufValues, error
from tokenmesh.shared.gguf.names import StoredTensor, stored_as
from tokenmesh.shared.gguf.reader import GgufFile, GgufTensor, part_paths
from tokenmesh.shared.gguf.rope import ROPE_TENSORS
from tokenmesh.shared.gguf.tokenizer import token_ids, tokenizer_of

METHOD: Final = "gguf"
"""Its quant_method in config.json."""
_FOLDER: Final = "~/.cache/tokenmesh/gguf"
_LAYOUT: Final = 3
"""Of what is written; a change makes directories anew."""
_PLAIN: Final = ("F32", "F16", "BF16")
_SIZES: Final = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1}
_PIECE_BYTES: Final = 16 << 20

logger = logging.getLogger(__name__)


def is_gguf(path: Path) -> bool:
    """Whether a path is a file that says it is of this format."""
    return path.is_file() and path.suffix == ".gguf"


def unpacked(path: Path, folder: str = _FOLDER) -> Path:
    """The directory of a file, made unless it is there; blocks.

    Raises CheckpointError for a file that cannot be read or served.
    """
    try:
        seen = f"{path.resolve()} {_LAYOUT}"
        for part in part_paths(path):
            status = part.stat()
            seen += f" {status.st_size} {status.st_mtime_ns}"
        place = Path(folder).expanduser()
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        target = place / f"{path.stem}-{hashlib.sha256(seen.encode()).hexdigest()[:16]}"
        with (place / f"{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another service may be making it
            if not target.is_dir():
                _make(GgufFile.read(path), target)
    except OSError as problem:
        raise CheckpointError(f"{path}: cannot be unpacked: {problem}", param="model") from problem
    return target


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
    scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
    try:
        contents = {
            "config.json": config,
            "tokenizer.json": whole,
            "tokenizer_config.json": tokenizer_config,
        }
        for name, content in contents.items():
            text = json.dumps(content, ensure_ascii=False)
            (scratch / name).write_text(text, encoding="utf-8")
        _write_weights(file, kind, names, more, config, scratch / "model.safetensors")
        scratch.replace(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    logger.info("unpacked %s into %s", file.path, target)


def _write_weights(
    file: GgufFile,
    kind: Architecture,
    names: dict[str, StoredTensor],
    more: list[MadeTensor],
    config: dict[str, Any],
    path: Path,
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, stored in names.items():
        tensor = file.tensors[name]
        shape, dtype = list(stored.shape), tensor.type.name
        if dtype not in _PLAIN:
            if len(shape) != 2 or not name.endswith(".weight"):
                raise error(file, f"tensor {name} is of type {dtype}, and is not a matrix")
            shape, dtype = [shape[0], tensor.row_bytes], "U8"
        # experts lie one after the other
        size = tensor.num_bytes // len(stored.names)
        for own in stored.names:
            begin, end = end, end + size
            header[own] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    for each in more:
        begin, end = end, end + math.prod(each.shape) * _SIZES[each.dtype]
        offsets = {"shape": each.shape, "data_offsets": [begin, end]}
        header[each.name] = {"dtype": each.dtype, **offsets}
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    with path.open("wb") as to:
        to.write(len(described).to_bytes(8, "little") + described)
        for name in names:
            with file.tensors[name].path.open("rb") as source:
                for piece in _pieces(file, kind, source, name, config):
                    to.write(piece)
        for each in more:
            for piece in each.pieces():
                to.write(piece)
        to.flush()
        os.fsync(to.fileno())


def _pieces(
    file: GgufFile, kind: Architecture, source: BinaryIO, name: str, config: dict[str, Any]
) -> Iterator[bytes]:
    """The bytes of a tensor in the order of transformers."""
    tensor = file.tensors[name]
    source.seek(tensor.offset)
    part = name.split(".")[-2]
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(part)
    if heads is not None and kind.is_permuted:
        yield _by_halves(file, name, tensor, source.read(tensor.num_bytes), config[heads])
        return
    if kind.adds_one and part.endswith("norm"):
        yield _less_one(file, name, tensor, source.read(tensor.num_bytes))
        return
    left = tensor.num_bytes
    while left > 0:
        piece = source.read(min(left, _PIECE_BYTES))
        if not piece:
            raise error(file, f"tensor {name} ends early; is the file complete?")
        left -= len(piece)
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
