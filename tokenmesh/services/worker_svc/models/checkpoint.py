"""Checkpoint: the tensors of a model directory, each taken once, nothing left over.

Bytes stream from the file into their final place, on whichever device, one tensor at a time; only
where a type changes or a device is in between do they pass through one bounded buffer. A tensor
that nobody asks for is an error like one that is missing: both mean that the model would not
compute what its authors trained.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import torch

from tokenmesh.shared.clock import perf_s
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.tensor_file import TensorFile
from tokenmesh.shared.tensor_shards import TensorShards

LEFT_OVER_SHOWN: Final = 5
"""Names listed in the error about unknown tensors."""

_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BUFFER_BYTES: Final = 4 << 20


class Checkpoint:
    """All tensors of a directory."""

    def __init__(
        self,
        directory: Path,
        device: torch.device | None = None,
        buffer_bytes: int = _BUFFER_BYTES,
    ) -> None:
        """Read every shard's header. Raises CheckpointError when one is missing or broken.

        Tensors are made on `device` (default: CPU). What must be converted, or copied to another
        device, goes there in pieces of `buffer_bytes`.
        """
        self.directory = directory
        self.bytes_read = 0
        self.read_s = 0.0
        """Seconds in the file system, of all that loading takes."""
        self._device = device or torch.device("cpu")
        self._buffer_bytes = buffer_bytes
        self._buffer: torch.Tensor | None = None
        self._shards = TensorShards(directory)
        self._taken: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._shards

    def __len__(self) -> int:
        return len(self._shards)

    def num_bytes(self, ignored: tuple[str, ...]) -> int:
        """Bytes of the tensors that a model takes: all but those with a prefix in `ignored`."""
        return sum(
            self._shards.file_of(name)[name].num_bytes
            for name in self._shards
            if not _is_left_out(name, ignored)
        )

    @property
    def device(self) -> torch.device:
        """Where tensors are read to."""
        return self._device

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors, by name."""
        return {name: self._shards.file_of(name)[name].shape for name in self._shards}

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor; the directory if none does."""
        return self._shards.file_of(name).path if name in self._shards else self.directory

    def type_of(self, name: str) -> str:
        """Of a tensor, as the format spells it. Raises KeyError."""
        return self._shards.file_of(name)[name].dtype

    def check_types(self, also: tuple[str, ...], apart: Collection[str] = ()) -> None:
        """Raise CheckpointError for a tensor of a type that is neither loaded nor in `also`.

        The tensors in `apart` are not looked at.
        """
        for name in self._shards:
            stored = self.type_of(name)
            if stored not in _DTYPES and stored not in also and name not in apart:
                raise _unknown_type(self.file_of(name), name, stored)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor in `dtype`. Raises CheckpointError that names it."""
        # found or not, before memory is asked for
        self._find(name, shape)
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self.take_into(name, tensor)
        return tensor

    def take_rows(
        self, named: list[tuple[str, int]], inner: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Tensors [size, *inner] one below the other, read into one: [sum of sizes, *inner]."""
        total = sum(size for _, size in named)
        rows = torch.empty((total, *inner), dtype=dtype, device=self._device)
        first = 0
        for name, size in named:
            self.take_into(name, rows[first : first + size])
            first += size
        return rows

    def take_into(self, name: str, target: torch.Tensor) -> None:
        """Read a tensor into a contiguous one of its shape. Raises CheckpointError."""
        file, stored = self._find(name, tuple(target.shape))
        self._taken.add(name)
        flat = target.view(-1)
        if flat.dtype == stored and flat.device.type == "cpu":
            self._read(file, name, flat, 0)
            return
        buffer = self._buffer_of(stored)
        for first in range(0, len(flat), len(buffer)):
            piece = flat[first : first + len(buffer)]
            self._read(file, name, buffer[: len(piece)], first * stored.itemsize)
            piece.copy_(buffer[: len(piece)])

    def finish(self, ignored: tuple[str, ...]) -> None:
        """Raise CheckpointError when a tensor was not taken, unless its prefix is in `ignored`."""
        self._buffer = None
        unknown = sorted(
            name
            for name in self._shards
            if name not in self._taken and not _is_left_out(name, ignored)
        )
        if unknown:
            raise CheckpointError(f"{self.directory}: unknown tensors: {listed(unknown)}")

    def _find(self, name: str, shape: tuple[int, ...]) -> tuple[TensorFile, torch.dtype]:
        """The file of a tensor that has this shape, and its type there."""
        if name not in self._shards:
            raise CheckpointError(f"{self.directory}: tensor {name} {list(shape)} is missing")
        file = self._shards.file_of(name)
        entry = file[name]
        if entry.shape != shape:
            raise CheckpointError(f"{file.path}: {misshapen(name, entry.shape, shape)}")
        stored = _DTYPES.get(entry.dtype)
        if stored is None:
            raise _unknown_type(file.path, name, entry.dtype)
        return file, stored

    def _read(self, file: TensorFile, name: str, target: torch.Tensor, start: int) -> None:
        """Fill a flat CPU tensor with a tensor's bytes from `start` on."""
        began_s = perf_s()
        file.read_into(name, target.view(torch.uint8).numpy().data, start)
        self.read_s += perf_s() - began_s
        self.bytes_read += target.nbytes

    def _buffer_of(self, dtype: torch.dtype) -> torch.Tensor:
        """The buffer as elements of a type; in pinned memory where a GPU copies from it."""
        if self._buffer is None:
            self._buffer = torch.empty(
                self._buffer_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda"
            )
        return self._buffer.view(dtype)


def _is_left_out(name: str, ignored: tuple[str, ...]) -> bool:
    """Parts that other services run, and buffers that follow from config.json."""
    return name.startswith(ignored) or name.endswith("rotary_emb.inv_freq")


def _unknown_type(path: Path, name: str, stored: str) -> CheckpointError:
    known = ", ".join(_DTYPES)
    return CheckpointError(f"{path}: tensor {name} has type {stored}; supported are {known}")


def misshapen(
    name: str, stored: Sequence[int], asked: Sequence[int], asks: str = "config.json"
) -> str:
    """What is wrong with a tensor; `asks`: what says its shape."""
    return f"tensor {name} has shape {list(stored)}; {asks} asks for {list(asked)}"


def listed(names: Collection[str]) -> str:
    """The first of the names, and how many more there are."""
    more = len(names) - LEFT_OVER_SHOWN
    shown = ", ".join(sorted(names)[:LEFT_OVER_SHOWN])
    return shown + (f" and {more} more" if more > 0 else "")
