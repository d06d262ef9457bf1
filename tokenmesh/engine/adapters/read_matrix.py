"""The matrices of an adapter's file, read and converted in small pieces alongside running steps.

A piece is small enough that torch does not divide it among threads: the threads of a step wait for
each other, so each of them that a reader holds up holds up the step.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from tokenmesh.engine.adapters.peft_config import refusal, without_folder
from tokenmesh.shared.clock import perf_s, process_cpu_s, sleep_s, thread_cpu_s
from tokenmesh.shared.errors import CheckpointError, InvalidInput
from tokenmesh.shared.tensor_file import TensorFile

DTYPES: Final = {
    **{"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    # numbers as they are, without scales
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
_PIECE_ELEMENTS: Final = 32768
"""torch's grain size of elementwise operations."""
_SHARE: Final = 0.1
"""Reading takes this share of one processor's time, alongside steps."""
_BUSY: Final = 0.2
"""Processors' time of the other threads, above which they are taken to compute steps."""
_MAX_REST_S: Final = 0.02


class ReadPace:
    """Keeps one thread to a tenth of a processor while the process's other threads compute."""

    def __init__(self) -> None:
        self._mark()

    def rest(self) -> None:
        """Call it after each piece of work; sleeps for at most 20 ms."""
        wall_s, own_s = perf_s() - self._wall_s, thread_cpu_s() - self._own_s
        others_s = process_cpu_s() - self._all_s - own_s
        # the sleep belongs to the next piece: it shows whether the others still compute
        self._mark()
        if others_s > _BUSY * wall_s:
            sleep_s(min(_MAX_REST_S, own_s * (1 / _SHARE - 1)))

    def _mark(self) -> None:
        self._wall_s, self._own_s, self._all_s = perf_s(), thread_cpu_s(), process_cpu_s()


class MatrixReader:
    """Reads tensors of one file, each once; `digest` gets types, shapes and bytes of all."""

    def __init__(self, file: TensorFile, digest: "hashlib._Hash", dtype: torch.dtype) -> None:
        """dtype: of the matrices that are returned."""
        self.pace = ReadPace()
        self._file = file
        self._digest = digest
        self._dtype = dtype

    def note(self, text: str) -> None:
        """Let the digest depend on a text."""
        self._digest.update(f"{text}\0".encode())

    def read(self, name: str, columns: Sequence[slice] | None = None) -> torch.Tensor:
        """As it is stored, in `dtype`; of a matrix only `columns`. Raises InvalidInput."""
        shape = self._file[name].shape
        if columns is not None:
            shape = shape[0], _width(columns)
        made = torch.empty(shape, dtype=self._dtype, device="cpu")
        rows = made.view(shape[0], -1)
        for first, piece in self._pieces(name):
            own = [piece] if columns is None else [piece[:, each] for each in columns]
            at = 0
            for part in own:
                rows[first : first + len(piece), at : at + part.shape[1]] = part
                at += part.shape[1]
        return made

    def read_turned(
        self, name: str, scale: float, rows: Sequence[slice] | None = None
    ) -> torch.Tensor:
        """[O, r] -> [r, O], times `scale`; only `rows` of the O. Raises InvalidInput."""
        outputs, rank = self._file[name].shape
        taken = (slice(0, outputs),) if rows is None else rows
        made = torch.empty((rank, _width(taken)), dtype=self._dtype, device="cpu")
        for first, piece in self._pieces(name):
            turned, at = (piece.float() * scale).t(), 0
            for part in taken:
                start, stop = max(first, part.start), min(first + len(piece), part.stop)
                if start < stop:
                    place = slice(at + start - part.start, at + stop - part.start)
                    made[:, place] = turned[:, start - first : stop - first]
                at += part.stop - part.start
        return made

    def reordered(self, matrix: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """matrix [r, O] with its columns in another order, in place."""
        step = max(1, _PIECE_ELEMENTS // matrix.shape[1])
        for first in range(0, len(matrix), step):
            rows = matrix[first : first + step]
            rows.copy_(rows.index_select(1, order))
            self.pace.rest()
        return matrix

    def _pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """The number of its first row and some rows of a tensor, in its own type."""
        entry = self._file[name]
        num_rows = entry.shape[0]
        row_bytes = entry.num_bytes // num_rows
        step = max(1, _PIECE_ELEMENTS * num_rows // torch.Size(entry.shape).numel())
        self._digest.update(f"{entry.dtype} {entry.shape}\0".encode())
        for first in range(0, num_rows, step):
            count = min(step, num_rows - first)
            data = bytearray(count * row_bytes)
            try:
                self._file.read_into(name, memoryview(data), first * row_bytes)
            except CheckpointError as error:
                why = without_folder(self._file.path, error)
                raise InvalidInput(why, param="lora_path") from error
            self._digest.update(data)
            kind = DTYPES[entry.dtype]
            piece = torch.frombuffer(data, dtype=torch.uint8).view(kind).view(count, -1)
            if kind.itemsize == 1:
                piece = piece.float()
            if not bool(torch.isfinite(piece).all()):
                raise refusal(self._file.path, name, "holds numbers that are not finite")
            yield first, piece
            self.pace.rest()


def _width(parts: Sequence[slice]) -> int:
    return sum(part.stop - part.start for part in parts)
