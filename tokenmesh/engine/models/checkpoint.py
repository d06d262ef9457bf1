"""Checkpoint: the tensors of a model directory, each taken once, nothing left over.

Bytes stream from the file into their final place, on whichever device, one tensor at a time; only
where a type changes or a device is in between do they pass through one bounded buffer. A tensor
that the model does not use is an error, as is one that is missing: in both cases the model would
not compute what its authors trained.
"""

import logging
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

import torch

from tokenmesh.engine.models.quantization import (
    EncodedWeight,
    Quantization,
    find_encoded,
)
from tokenmesh.kernels.linear.formats import Codes, Part, merged
from tokenmesh.shared.clock import perf_s
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.tensor_file import TensorEntry, TensorFile, TensorShards

LEFT_OVER_SHOWN: Final = 5
"""Names listed in the error about unknown tensors."""

_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PART_DTYPES: Final = {
    **_DTYPES,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""Weights are decoded from tensors of these types."""
_BUFFER_BYTES: Final = 4 << 20

logger = logging.getLogger(__name__)


class Checkpoint:
    """All tensors of a directory."""

    def __init__(
        self,
        directory: Path,
        device: torch.device | None = None,
        buffer_bytes: int = _BUFFER_BYTES,
        without: Collection[str] = (),
        is_extra: Callable[[str], bool] = lambda _name: False,
        name_of: Callable[[str], str] | None = None,
    ) -> None:
        """Read every shard's header. Raises CheckpointError when one is missing or broken.

        Tensors are made on `device` (default: CPU). What must be converted, or copied to another
        device, goes there in pieces of `buffer_bytes`. without: names that are read elsewhere;
        is_extra: see `ModelFacts`; name_of: what a stored name is called here.
        """
        self.directory = directory
        self.bytes_read = 0
        self.read_s = 0.0
        """Seconds in the file system, of all that loading takes."""
        self._device = device or torch.device("cpu")
        self._buffer_bytes = buffer_bytes
        self._buffer: torch.Tensor | None = None
        self._shards = TensorShards(
            directory, lambda name: name not in without and not is_extra(name)
        )
        self._stored_names: dict[str, str] = {}
        if name_of is not None:
            self._stored_names = {name_of(name): name for name in self._shards}
            self._shards.rename(name_of)
        self._taken: set[str] = set()
        self._encoded: dict[str, EncodedWeight] = {}
        self._parts: frozenset[str] = frozenset()
        """Tensors that weights are decoded from."""
        self._unapplied: frozenset[str] = frozenset()
        """Tensors that nothing needs."""

    def decode(self, quantization: Quantization) -> None:
        """Let weights that are stored so be taken by their plain names, in place of their parts.

        Raises CheckpointError for parts that do not fit each other.
        """
        bytes_read = self.bytes_read
        self._encoded = {each.name: each for each in find_encoded(self._shards, self, quantization)}
        self.bytes_read = bytes_read  # shapes that parts hold are read again with the numbers
        parts = (part.name for each in self._encoded.values() for part in each.parts.values())
        self._parts = frozenset(parts)
        self._unapplied = quantization.unapplied_of(self._shards) - self._parts
        if self._unapplied:
            logger.info(
                "%s: activations, keys and values are not quantized, so that %d scales of them "
                "are not applied: %s",
                self.directory,
                len(self._unapplied),
                listed(self._unapplied),
            )
        for name in self._plain():
            if name in self._encoded:
                part = next(iter(self._encoded[name].parts.values())).name
                problem = f"is a weight that {part} holds too"
                raise CheckpointError(f"{self.file_of(name)}: tensor {name} {problem}")

    def __contains__(self, name: object) -> bool:
        if name in self._encoded:
            return True
        return name in self._shards and name not in self._parts and name not in self._unapplied

    def __len__(self) -> int:
        return len(self._shards)

    def num_bytes(self, ignored: tuple[str, ...]) -> int:
        """Bytes of the tensors that a model takes: all but those with a prefix in `ignored`."""
        return sum(
            self._shards.file_of(name)[name].num_bytes
            for name in self._shards
            if not _is_left_out(name, ignored) and name not in self._unapplied
        )

    @property
    def device(self) -> torch.device:
        """Where tensors are read to."""
        return self._device

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors, by name; of quantized ones as they are taken."""
        plain = {name: self._shards.file_of(name)[name].shape for name in self._plain()}
        return plain | {name: each.shape for name, each in self._encoded.items()}

    def decoded_shape(self, name: str) -> tuple[int, ...]:
        """The shape of an encoded weight."""
        return self._encoded[name].shape

    def stored_bytes(self, name: str) -> int:
        """Bytes that the files hold of a tensor; of an encoded weight those of all its parts."""
        encoded = self._encoded.get(name)
        names = [name] if encoded is None else [each.name for each in encoded.parts.values()]
        return sum(self._shards.file_of(each)[each].num_bytes for each in names)

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor; the directory if none does."""
        if name in self._encoded:
            return self._encoded[name].file
        return self._shards.file_of(name).path if name in self._shards else self.directory

    def stored_name(self, name: str) -> str:
        """The name of a tensor in its file."""
        return self._stored_names.get(name, name)

    def is_encoded(self, name: str) -> bool:
        """Return whether a tensor is decoded when it is taken."""
        return name in self._encoded

    def is_neutral(self, name: str) -> bool:
        """Return whether it is a bias of zeros at an encoded weight, as AutoGPTQ writes for any
        module."""
        module, _, leaf = name.rpartition(".")
        part = self.part(name)
        if leaf != "bias" or part is None or f"{module}.weight" not in self._encoded:
            return False
        return not part.read().any()

    def part(self, name: str) -> Part | None:
        """A stored tensor; None if there is none, or of a type that no format has."""
        if name not in self._shards:
            return None
        file = self._shards.file_of(name)
        entry, dtype = file[name], _PART_DTYPES.get(file[name].dtype)
        if dtype is None:
            return None

        def read() -> torch.Tensor:
            tensor = torch.empty(entry.shape, dtype=dtype, device="cpu")
            self._read(file, name, tensor.view(-1), 0)
            return tensor

        def read_slices(slices: tuple[slice, ...]) -> torch.Tensor:
            if len(slices) > 2:
                return read()[slices]
            rows, columns = slices if len(slices) == 2 else (slice(0, 1), slices[0])
            row = entry.shape[-1]
            size = [each.stop - each.start for each in slices]
            tensor = torch.empty(size, dtype=dtype, device="cpu")
            start, width = rows.start * row + columns.start, columns.stop - columns.start
            if width == row:  # all rows at once
                self._read(file, name, tensor.view(-1), start * tensor.itemsize)
            else:
                self._read_rows(file, name, tensor.view(-1), start, width, row)
            return tensor

        return Part(name, dtype, entry.shape, read, read_slices)

    def check_types(self, also: tuple[str, ...]) -> None:
        """Raise CheckpointError for a tensor of a type that is neither loaded nor in `also`."""
        for name in self._plain():
            stored = self._shards.file_of(name)[name].dtype
            if stored not in _DTYPES and stored not in also:
                raise _unknown_type(self.file_of(name), name, stored)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor in `dtype`. Raises CheckpointError that names it."""
        # before memory is allocated
        self._check(name, shape)
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

    def take_part(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: slice,
        columns: slice | None,
        target: torch.Tensor,
    ) -> None:
        """Read rows of a tensor of `shape`, or columns of them, into a contiguous target.

        Other bytes of the file are not read. A tensor may be taken in several parts.
        """
        self._check(name, shape)
        self._taken.add(name)
        if name in self._encoded:
            columns = slice(0, shape[1]) if columns is None else columns
            self._encoded[name].fill_part(target, rows, columns)
            return
        file = self._shards.file_of(name)
        stored = _DTYPES[file[name].dtype]
        row = math.prod(shape[1:])
        first, width = (0, row) if columns is None else (columns.start, target[0].numel())
        flat, buffer = target.view(len(target), -1), self._buffer_of(stored)
        step = max(1, len(buffer) // max(1, width))
        for done in range(0, len(flat), step):
            piece = flat[done : done + step]
            start = (rows.start + done) * row + first
            read = buffer[: piece.numel()] if piece.numel() <= len(buffer) else None
            read = torch.empty(piece.numel(), dtype=stored) if read is None else read
            self._read_rows(file, name, read, start, width, row)
            piece.copy_(read.view(piece.shape))

    def _read_rows(
        self, file: TensorFile, name: str, target: torch.Tensor, start: int, width: int, row: int
    ) -> None:
        """Fill a flat CPU tensor with `width` elements of each row of a file's tensor."""
        began_s, size = perf_s(), target.itemsize
        data = target.view(torch.uint8).numpy().data
        if width == row:
            file.read_into(name, data, start * size)
        else:
            file.read_pieces(name, data, start * size, width * size, row * size)
        self.read_s += perf_s() - began_s
        self.bytes_read += target.nbytes

    def take_codes(
        self,
        named: list[tuple[str, int]],
        inputs: int,
        taken: Sequence[Sequence[slice]] = (),
        columns: slice | None = None,
    ) -> Codes | None:
        """Weights [size, inputs] one below the other as one of codes.

        taken: rows of each; empty: all. Of `columns` only, unless inputs have their own order.
        None where one is stored plainly, in a format without codes, or unlike the others.
        """
        rows = taken or [(slice(0, size),) for _, size in named]
        if any(name not in self._encoded for name, _ in named):
            return None
        parts = []
        bytes_read = self.bytes_read
        for (name, size), own in zip(named, rows, strict=True):
            self._check(name, (size, inputs))
            parts.append(self._encoded[name].codes(own, columns or slice(0, inputs)))
        found = [each for each in parts if each is not None]
        codes = merged(found) if len(found) == len(parts) else None
        if codes is None:
            self.bytes_read = bytes_read  # they are read again
        else:
            self._taken.update(name for name, _ in named)
        return codes

    def take_stack(self, name: str) -> Callable[[int], Codes | None]:
        """The codes of each matrix of an encoded stack [E, ...]; see `EncodedWeight.codes`."""
        self._taken.add(name)
        return self._encoded[name].codes_by_expert()

    def take_into(self, name: str, target: torch.Tensor) -> None:
        """Read a tensor into a contiguous one of its shape. Raises CheckpointError."""
        self._check(name, tuple(target.shape))
        self._taken.add(name)
        if name in self._encoded:
            self._encoded[name].fill(target)
            return
        file = self._shards.file_of(name)
        stored = _DTYPES[file[name].dtype]
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
            for name in self.shapes()
            if name not in self._taken
            and not _is_left_out(name, ignored)
            and not self.is_neutral(name)
        )
        if unknown:
            raise CheckpointError(f"{self.directory}: unknown tensors: {listed(unknown)}")

    def _plain(self) -> list[str]:
        """Tensors that are taken as they are stored."""
        apart = self._parts | self._unapplied
        return [name for name in self._shards if name not in apart]

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise CheckpointError unless a tensor is there, of this shape and a type that is read."""
        if name not in self:
            raise CheckpointError(f"{self.directory}: tensor {name} {list(shape)} is missing")
        encoded = self._encoded.get(name)
        entry = self._shards.file_of(name)[name] if encoded is None else encoded
        if entry.shape != shape:
            raise CheckpointError(f"{self.file_of(name)}: {misshapen(name, entry.shape, shape)}")
        if isinstance(entry, TensorEntry) and entry.dtype not in _DTYPES:
            raise _unknown_type(self.file_of(name), name, entry.dtype)

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
    """Return what is wrong with a tensor; `asks`: what says its shape."""
    return f"tensor {name} has shape {list(stored)}; {asks} asks for {list(asked)}"


def listed(names: Collection[str]) -> str:
    """The first of the names, and how many more there are."""
    more = len(names) - LEFT_OVER_SHOWN
    shown = ", ".join(sorted(names)[:LEFT_OVER_SHOWN])
    return shown + (f" and {more} more" if more > 0 else "")
