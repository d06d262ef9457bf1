"""model.bin of CTranslate2: which variables it holds and where they are.

Layout, little-endian: u32 version of the format, name of the specification, u32 its revision, u32
number of variables; of each its name, u8 rank, u32 for each dimension, u8 type, u32 bytes, and the
bytes; then u32 number of aliases, of each its name and that of a variable. A name is a u16 length
with a zero byte that ends it. Nothing is allocated by what the file says: contents are skipped.
"""

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.placeholder_files import placeholder_problem

MODEL_FILE: Final = "model.bin"
_VERSION: Final = 6
"""Since CTranslate2 2; Whisper came with 3."""
_MOST_VARIABLES: Final = 1 << 16
"""The largest Whisper has 1,300."""
_MOST_NAME_BYTES: Final = 256
_MOST_DIMENSIONS: Final = 4
_TYPES: Final = (("F32", 4), ("I8", 1), ("I16", 2), ("I32", 4), ("F16", 2), ("BF16", 2))
"""By number; as safetensors spells them, with their bytes."""


@dataclass(frozen=True, slots=True)
class Ct2Variable:
    """A tensor or a number of a file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Where its first byte is, from the start of the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Ct2File:
    """The table of contents of a file, which is opened for each read and never held open."""

    path: Path
    specification: str
    """The kind of the model, such as WhisperSpec."""
    revision: int
    """The revision of the specification that the file follows."""
    variables: Mapping[str, Ct2Variable]
    """By name and by alias."""
    aliases: Mapping[str, str]
    """Names of `variables` that stand for others."""

    @classmethod
    def read(cls, directory: Path) -> "Ct2File":
        """Raises CheckpointError for a file that is broken, cut off, or of another version."""
        path = directory / MODEL_FILE
        try:
            with path.open("rb") as file:
                return _Contents(path, file).read()
        except (OSError, ValueError) as error:
            problem = f"cannot be read as CTranslate2: {placeholder_problem(path) or error}"
            raise CheckpointError(f"{path}: {problem}", param="model") from error

    def error(self, problem: str) -> CheckpointError:
        """An error that names the file."""
        return CheckpointError(f"{self.path}: {problem}", param="model")

    def content(self, variable: Ct2Variable, start: int = 0, size: int | None = None) -> bytes:
        """Bytes of a variable. Raises CheckpointError where the file has become shorter."""
        size = variable.num_bytes - start if size is None else size
        try:
            with self.path.open("rb") as file:
                file.seek(variable.offset + start)
                found = file.read(size)
        except OSError as error:
            raise self.error(f"cannot be read: {error}") from error
        if len(found) != size:
            raise self.error("has become shorter while it was read")
        return found


class _Contents:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size = os.fstat(file.fileno()).st_size

    def read(self) -> Ct2File:
        """The whole table. Raises ValueError for a file that does not hold one."""
        version = self._number("I", "its version")
        if version != _VERSION:
            raise ValueError(
                f"its version is {version}, and version {_VERSION} is served, that of CTranslate2 "
                "3 and 4; is the file complete?"
            )
        specification, revision = self._name(), self._number("I", "its revision")
        count = self._number("I", "its number of variables")
        if count > _MOST_VARIABLES:
            raise ValueError(f"it has {count} variables; is the file complete?")
        variables = dict[str, Ct2Variable]()
        for _ in range(count):
            name, variable = self._variable()
            if name in variables:
                raise ValueError(f"it holds variable {name} twice")
            variables[name] = variable
        aliases = self._aliases(variables)
        if (left := self._size - self._file.tell()) > 0:
            raise ValueError(f"{left} bytes follow its last variable")
        return Ct2File(self._path, specification, revision, variables, aliases)

    def _variable(self) -> tuple[str, Ct2Variable]:
        name = self._name()
        rank = self._number("B", f"the dimensions of {name}")
        if rank > _MOST_DIMENSIONS:
            raise ValueError(f"variable {name} has {rank} dimensions")
        shape = tuple(self._number("I", f"the dimensions of {name}") for _ in range(rank))
        kind = self._number("B", f"the type of {name}")
        if kind >= len(_TYPES):
            raise ValueError(f"variable {name} is of unknown type {kind}")
        dtype, size = _TYPES[kind]
        num_bytes = self._number("I", f"the bytes of {name}")
        if math.prod(shape) * size != num_bytes:
            raise ValueError(f"variable {name} has {num_bytes} bytes for {dtype} {list(shape)}")
        offset = self._file.tell()
        if offset + num_bytes > self._size:
            left = self._size - offset
            raise ValueError(f"it ends {num_bytes - left} bytes before the end of variable {name}")
        self._file.seek(num_bytes, os.SEEK_CUR)
        return name, Ct2Variable(dtype, shape, offset, num_bytes)

    def _aliases(self, variables: dict[str, Ct2Variable]) -> dict[str, str]:
        """Add them to the variables, with their scales where they are quantized."""
        found = dict[str, str]()
        count = self._number("I", "its number of aliases")
        if count > _MOST_VARIABLES:
            raise ValueError(f"it has {count} aliases")
        for _ in range(count):
            alias, name = self._name(), self._name()
            if alias in variables or name not in variables:
                raise ValueError(f"it names variable {name} {alias} as well, which cannot be")
            found[alias] = name
            for ending in ("", "_scale"):
                if name + ending in variables:
                    variables[alias + ending] = variables[name + ending]
        return found

    def _name(self) -> str:
        length = self._number("H", "the length of a name")
        if not 1 < length <= _MOST_NAME_BYTES:
            raise ValueError(f"a name at byte {self._file.tell()} has {length} bytes")
        found = self._file.read(length)
        if len(found) != length:
            raise ValueError(f"it ends within a name at byte {self._size}")
        if found[-1] or not found[:-1].isascii() or not found[:-1].decode().isprintable():
            raise ValueError(f"no name is at byte {self._file.tell() - length}")
        return found[:-1].decode()

    def _number(self, code: str, what: str) -> int:
        form = struct.Struct(f"<{code}")
        found = self._file.read(form.size)
        if len(found) != form.size:
            raise ValueError(f"it ends at byte {self._size}, before {what}")
        return int(form.unpack(found)[0])
