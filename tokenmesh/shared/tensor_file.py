"""Safetensors files: where each tensor is, reading one at a time, and files of a directory.

Needs neither torch nor safetensors: bytes are read into the memory of the caller, so nothing is
mapped and only headers are kept. Layout: u64 little-endian header length, a JSON header
{name: {"dtype", "shape", "data_offsets"}}, then the elements, little-endian, no gaps.
"""

import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec

from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.placeholder_files import placeholder_problem

MAX_HEADER_BYTES: Final = 100 << 20
"""The same bound as in the safetensors library."""
READ_BYTES: Final = 1 << 30
"""Most bytes of one system call; Linux ends a read at 2 GiB."""

BYTES_BY_DTYPE: Final = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Sizes of the types whose tensors are checked; a file may hold others that are not read."""

_METADATA: Final = "__metadata__"
_LENGTH: Final = struct.Struct("<Q")
_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


_header_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry_decoder: Final = msgspec.json.Decoder(_Entry)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file."""

    dtype: str
    """As the format spells it: F32, F16, BF16, I8, ..."""
    shape: tuple[int, ...]
    offset: int
    """Where its first byte is, from the start of the file."""
    num_bytes: int


class TensorFile:
    """A file's table of contents. The file is opened for each read and never held open."""

    def __init__(self, path: Path, max_header_bytes: int = MAX_HEADER_BYTES) -> None:
        """Read the header. Raises CheckpointError that names the file."""
        self.path = path
        try:
            self._entry_by_name = dict(_read_header(path, max_header_bytes))
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            problem = placeholder_problem(path) or f"{error}; is the file complete?"
            raise CheckpointError(f"{path}: cannot be read as safetensors: {problem}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._entry_by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._entry_by_name)

    def __getitem__(self, name: str) -> TensorEntry:
        return self._entry_by_name[name]

    def rename(self, names: Mapping[str, str]) -> None:
        """Keep the tensors that are named, by other names."""
        self._entry_by_name = {new: self._entry_by_name[old] for old, new in names.items()}

    def read_into(self, name: str, target: memoryview, start: int = 0) -> None:
        """Fill `target`, a view of bytes, with a tensor's bytes from its byte `start` on.

        Raises CheckpointError when the file ends early.
        """
        self.read_pieces(name, target, start, len(target), len(target))

    def read_pieces(
        self, name: str, target: memoryview, start: int, piece: int, stride: int
    ) -> None:
        """Likewise in pieces of `piece` bytes, each `stride` bytes after the one before it."""
        entry = self._entry_by_name[name]
        count = len(target) // piece if piece else 0
        end = start + (count - 1) * stride + piece if count else start
        assert end <= entry.num_bytes, f"{name} holds {entry.num_bytes} bytes"
        try:
            with self.path.open("rb", buffering=0) as file:
                for number in range(count):
                    view = target[number * piece : (number + 1) * piece]
                    _read_at(file.fileno(), view, entry.offset + start + number * stride)
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{self.path}: tensor {name} cannot be read: {error}") from error


def _read_at(file: int, target: memoryview, position: int) -> None:
    while target:
        count = os.preadv(file, [target[:READ_BYTES]], position)
        if count == 0:
            raise EOFError("it has become shorter")
        target, position = target[count:], position + count


def _read_header(path: Path, max_bytes: int) -> Iterator[tuple[str, TensorEntry]]:
    """Every tensor in the order of its bytes. Raises ValueError for a file that is not whole."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length_bytes = file.read(_LENGTH.size)
        if len(length_bytes) < _LENGTH.size:
            raise ValueError(f"it holds {size} bytes only")
        (length,) = _LENGTH.unpack(length_bytes)
        if length > min(max_bytes, size - _LENGTH.size):
            raise ValueError(f"its header of {length} bytes does not fit")
        raw_by_name = _header_decoder.decode(file.read(length))
    raw_by_name.pop(_METADATA, None)
    start = _LENGTH.size + length
    entries = {name: _entry_decoder.decode(raw) for name, raw in raw_by_name.items()}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        num_bytes = _check(name, entry, end)
        yield name, TensorEntry(entry.dtype, entry.shape, start + end, num_bytes)
        end += num_bytes
    if start + end != size:
        raise ValueError(f"it holds {size} bytes, its header describes {start + end}")


def _check(name: str, entry: _Entry, expected_begin: int) -> int:
    """The bytes of a tensor that must follow the one before it."""
    begin, end = entry.data_offsets
    if begin != expected_begin or end < begin:
        raise ValueError(f"tensor {name} lies at {begin} to {end}, not from {expected_begin} on")
    size = BYTES_BY_DTYPE.get(entry.dtype)
    if size is not None and math.prod(entry.shape) * size != end - begin:
        raise ValueError(f"tensor {name} has {end - begin} bytes for shape {list(entry.shape)}")
    return end - begin


SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_SHARD: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_PICKLES: Final = (".bin", ".pt", ".pth")
_SHOWN_FILES: Final = 5


class TensorShards:
    """The tensors of a directory by name; `wants` leaves out those that are not of interest."""

    def __init__(self, directory: Path, wants: Callable[[str], bool] = lambda name: True) -> None:
        """Read the headers of every file that holds a wanted tensor.

        Raises CheckpointError when one is missing or broken.
        """
        self.directory = directory
        self._file_by_name: dict[str, TensorFile] = {}
        index = directory / INDEX_FILE
        if index.is_file():
            self._open_indexed(index, wants)
        elif (directory / SINGLE_FILE).is_file():
            file = TensorFile(directory / SINGLE_FILE)
            self._file_by_name = {name: file for name in file if wants(name)}
        else:
            self._open_all(shards_in(directory), wants)

    def __contains__(self, name: object) -> bool:
        return name in self._file_by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_by_name)

    def __len__(self) -> int:
        return len(self._file_by_name)

    def file_of(self, name: str) -> TensorFile:
        """The file that holds a tensor. Raises KeyError."""
        return self._file_by_name[name]

    def rename(self, name_of: Callable[[str], str]) -> None:
        """Call the wanted tensors by other names from here on, no two by the same."""
        names_by_file: dict[TensorFile, dict[str, str]] = {}
        for name, file in self._file_by_name.items():
            names_by_file.setdefault(file, {})[name] = name_of(name)
        for file, names in names_by_file.items():
            file.rename(names)
        self._file_by_name = {name_of(name): file for name, file in self._file_by_name.items()}

    def _open_all(self, shards: list[Path], wants: Callable[[str], bool]) -> None:
        """Open all shards: without an index each file says what it holds."""
        for file in map(TensorFile, shards):
            twice = next((name for name in file if name in self._file_by_name), None)
            if twice is not None:
                other = self._file_by_name[twice].path.name
                raise CheckpointError(f"{file.path}: tensor {twice} is in {other} as well")
            self._file_by_name |= {name: file for name in file if wants(name)}

    def _open_indexed(self, index: Path, wants: Callable[[str], bool]) -> None:
        all_shards = _read_index(index)
        if (self.directory / SINGLE_FILE).is_file() and SINGLE_FILE not in all_shards.values():
            # transformers reads the one and vLLM the other: nothing says which is the newer
            raise CheckpointError(
                f"{self.directory}: holds {SINGLE_FILE} and {INDEX_FILE}, which names other "
                "files; remove one of the two"
            )
        shard_by_name = {name: shard for name, shard in all_shards.items() if wants(name)}
        # a shard lies next to its index, whatever path is written there
        file_by_shard = {
            shard: TensorFile(self.directory / Path(shard).name)
            for shard in sorted(set(shard_by_name.values()))
        }
        for file in file_by_shard.values():
            self._file_by_name |= {name: file for name in file if wants(name)}
        # where several files hold a name, the index says which of them counts
        for name, shard in shard_by_name.items():
            file = self._file_by_name[name] = file_by_shard[shard]
            if name not in file:
                raise CheckpointError(f"{file.path}: tensor {name} is missing")


def shards_in(directory: Path) -> list[Path]:
    """All shards of a directory without an index. Raises CheckpointError where some are missing."""
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    shards = [found for name in names if (found := _SHARD.fullmatch(name))]
    sets = {(found[1], int(found[3])) for found in shards}
    if len(sets) != 1:
        raise CheckpointError(f"{directory}: {_missing_text(names, len(sets))}")
    ((stem, count),) = sets
    wanted = [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    if missing := sorted(set(wanted) - set(names)):
        shown = ", ".join(missing[:_SHOWN_FILES])
        raise CheckpointError(f"{directory}: {len(missing)} of {count} shards are missing: {shown}")
    return [directory / name for name in wanted]


def _missing_text(names: list[str], num_sets: int) -> str:
    """Why a directory cannot be loaded, by the files that it has."""
    if num_sets > 1:
        return f"holds shards of {num_sets} checkpoints and no {INDEX_FILE}, which would say which"
    found = [name for name in names if name.endswith(".safetensors")]
    if found:
        shown = ", ".join(found[:_SHOWN_FILES])
        return f"holds neither {SINGLE_FILE} nor {INDEX_FILE}, only {shown}"
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return f"holds pickled weights only ({pickles[0]}); safetensors are read"
    return f"holds no weights: neither {SINGLE_FILE}, nor shards"


def _read_index(index: Path) -> dict[str, str]:
    """The index's map from tensor to file. Raises CheckpointError."""
    try:
        shard_by_name = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(shard) for name, shard in shard_by_name.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: is not a valid index ({error!r})") from error
