"""The header of a GGUF file: its metadata and where its tensors are.

Everything that is allocated is bounded by what the file can hold: a count or a length beyond that
is an error before memory is taken.
"""

import math
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.placeholder_files import placeholder_problem

MAGIC: Final = b"GGUF"
MAX_HEADER_BYTES: Final = 256 << 20
"""GgufValues and tensor descriptions; vocabularies take some MiB."""
MAX_NAME_BYTES: Final = 256
MAX_DIMENSIONS: Final = 4
MAX_NESTING: Final = 1
"""Lists of lists hold nothing that is read."""
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_PART_NAME: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
"""Files of a model that llama.cpp has split; they are numbered from 1 on."""
_SCALARS: Final = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"},
    **{10: "Q", 11: "q", 12: "d"},
}
_STRING: Final = 8
_ARRAY: Final = 9


class BlockType(NamedTuple):
    """A format in which the elements of a tensor are stored, block by block."""

    name: str
    elements: int
    """Elements of a block."""
    size: int
    """Its bytes."""


TYPES: Final[Mapping[int, BlockType]] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}
_OTHER_TYPES: Final = {
    **{15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS"},
    **{19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M", 34: "TQ1_0"},
    **{35: "TQ2_0"},
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file."""

    type: BlockType
    shape: tuple[int, ...]
    """As torch has it: the innermost dimension last."""
    offset: int
    """Where its first byte is, from the start of the file."""
    num_bytes: int
    path: Path
    """The file that it is in."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, the innermost dimension."""
        return self.shape[-1] // self.type.elements * self.type.size


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The table of contents of a file, or of all files that a model is split into."""

    path: Path
    """The first one."""
    values: Mapping[str, Any]
    """GgufValues by key; lists are Python's."""
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def read(cls, path: Path) -> "GgufFile":
        """Raises CheckpointError for a file that is broken, cut off, or of another format, for a
        part that is not the first, and for parts that do not fit each other."""
        whole = _read_header(path)
        if whole.values.get("split.count", 1) == 1:
            return whole
        parts = part_paths(path)
        try:
            return _joined([whole, *map(_read_header, parts[1:])], len(parts))
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}", param="model") from error


def part_paths(path: Path) -> list[Path]:
    """All files of a model by the name of its first one; a file alone where it is not one of many.

    They need not exist.
    """
    named = _PART_NAME.fullmatch(path.name)
    if named is None or int(named[2]) != 1:
        return [path]
    return [
        path.with_name(f"{named[1]}-{number:05}-of-{named[3]}.gguf")
        for number in range(1, int(named[3]) + 1)
    ]


def _read_header(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file:
            return _Header(path, file).read()
    except (OSError, ValueError, struct.error) as error:
        problem = f"cannot be read as GGUF: {placeholder_problem(path) or error}"
        raise CheckpointError(f"{path}: {problem}", param="model") from error


def _joined(parts: Sequence[GgufFile], named: int) -> GgufFile:
    """named: files by the name of the first one. Raises ValueError."""
    first = parts[0]
    count = first.values["split.count"]
    if first.values.get("split.no") != 0:
        raise ValueError("it is not the first part; name the one that ends in -00001-of-*.gguf")
    if count != named:
        raise ValueError(f"it is one of {count} parts, and is not named -00001-of-{count:05}.gguf")
    tensors: dict[str, GgufTensor] = {}
    for number, part in enumerate(parts):
        found = part.values.get("split.no"), part.values.get("split.count")
        if found != (number, count):
            raise ValueError(f"{part.path.name} is not part {number + 1} of {count}")
        twice = tensors.keys() & part.tensors
        if twice:
            raise ValueError(f"duplicate tensor {min(twice)}")
        tensors |= part.tensors
    total = first.values.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ValueError(f"its parts have {len(tensors)} tensors instead of {total}")
    return GgufFile(first.path, first.values, tensors)


class _Header:
    """Reads values one after the other, all within the file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._left = min(self._size, MAX_HEADER_BYTES)

    def read(self) -> GgufFile:
        if self._bytes(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        (version,) = self._numbers("I", 1)
        if version not in _VERSIONS:
            known = ", ".join(map(str, _VERSIONS))
            raise ValueError(f"it is of version {version}; supported are {known}")
        num_tensors, num_values = self._numbers("Q", 2)
        values = {}
        for _ in range(self._count(num_values, 12, "values")):
            key = self._string()
            values[key] = self._value(*self._numbers("I", 1))
        count = self._count(num_tensors, 24, "tensors")
        described = [self._described() for _ in range(count)]
        alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"its alignment is {alignment!r}, not a power of two")
        start = -(-self._file.tell() // alignment) * alignment
        tensors = {}
        for name, block, shape, offset in described:
            if name in tensors:
                raise ValueError(f"duplicate tensor {name}")
            tensors[name] = self._placed(name, block, shape, start + offset)
        return GgufFile(self._path, values, tensors)

    def _described(self) -> tuple[str, BlockType, tuple[int, ...], int]:
        name = self._string(MAX_NAME_BYTES)
        (dimensions,) = self._numbers("I", 1)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = self._numbers("Q", dimensions)[::-1]
        kind, offset = *self._numbers("I", 1), *self._numbers("Q", 1)
        block = TYPES.get(kind)
        if block is None:
            known = ", ".join(each.name for each in TYPES.values())
            named = _OTHER_TYPES.get(kind, f"number {kind}")
            raise ValueError(f"tensor {name} is of type {named}; supported are {known}")
        return name, block, shape, offset

    def _placed(
        self, name: str, block: BlockType, shape: tuple[int, ...], offset: int
    ) -> GgufTensor:
        if not all(shape) or shape[-1] % block.elements:
            problem = f"has shape {list(shape)}, which blocks of {block.elements} do not fill"
            raise ValueError(f"tensor {name} {problem}")
        num_bytes = math.prod(shape) // block.elements * block.size
        if offset + num_bytes > self._size:
            needed = f"ends at byte {offset + num_bytes} of a file of {self._size}"
            raise ValueError(f"tensor {name} {needed}; is the file complete?")
        return GgufTensor(block, shape, offset, num_bytes, self._path)

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind], 1)[0]
        if kind != _ARRAY or depth > MAX_NESTING:
            raise ValueError(f"a value is of type {kind}")
        (inner,), (count,) = self._numbers("I", 1), self._numbers("Q", 1)
        if inner in _SCALARS:
            letter = _SCALARS[inner]
            return list(self._numbers(letter, self._count(count, struct.calcsize(letter), "items")))
        return [self._value(inner, depth + 1) for _ in range(self._count(count, 8, "items"))]

    def _count(self, count: int, least: int, what: str) -> int:
        """A number of things of at least `least` bytes each."""
        if count * least > self._left:
            raise ValueError(f"{count} {what} do not fit the file")
        return count

    def _string(self, longest: int | None = None) -> str:
        (length,) = self._numbers("Q", 1)
        if longest is not None and length > longest:
            raise ValueError(f"a name has {length} bytes")
        return self._bytes(length).decode("utf-8", "replace")

    def _numbers(self, letter: str, count: int) -> tuple[Any, ...]:
        form = f"<{count}{letter}"
        return struct.unpack(form, self._bytes(struct.calcsize(form)))

    def _bytes(self, count: int) -> bytes:
        if count > self._left:
            raise ValueError("it ends within its header")
        self._left -= count
        found = self._file.read(count)
        if len(found) < count:
            raise ValueError("it ends within its header")
        return found
