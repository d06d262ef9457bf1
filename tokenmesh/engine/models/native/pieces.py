"""Pieces: which outputs of which stored matrices a layer is made of, and how they are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from tokenmesh.engine.models.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Piece:
    """Outputs of one stored matrix."""

    name: str
    size: int
    """Outputs that are stored."""
    taken: tuple[slice, ...]
    """This rank has these."""

    @property
    def is_whole(self) -> bool:
        return self.taken == (slice(0, self.size),)

    @property
    def num_taken(self) -> int:
        return sum(part.stop - part.start for part in self.taken)

    @property
    def index(self) -> torch.Tensor:
        """The numbers of the outputs."""
        return torch.cat([torch.arange(part.start, part.stop) for part in self.taken])


def pieces_of(names: Sequence[str], sizes: Sequence[int], taken: Sequence[slice]) -> list[Piece]:
    """Matrices of `sizes` outputs, of each of which a slice is taken; stored one by one, or one
    below the other in a single tensor."""
    if len(names) == len(sizes):
        parts = zip(names, sizes, taken, strict=True)
        return [Piece(name, size, (part,)) for name, size, part in parts]
    (name,) = names
    firsts = accumulate(sizes[:-1], initial=0)
    moved = [slice(f + p.start, f + p.stop) for f, p in zip(firsts, taken, strict=True)]
    # what touches is one: all of a tensor is read at once
    merged = moved[:1]
    for part in moved[1:]:
        if part.start == merged[-1].stop:
            merged[-1] = slice(merged[-1].start, part.stop)
        else:
            merged.append(part)
    return [Piece(name, sum(sizes), tuple(merged))]


def read_pieces(
    checkpoint: Checkpoint,
    pieces: Sequence[Piece],
    inner: tuple[int, ...],
    dtype: torch.dtype,
    columns: slice | None = None,
) -> torch.Tensor:
    """The pieces one below the other: [outputs, *inner], or of their columns."""
    if columns is None and all(piece.is_whole for piece in pieces):
        return checkpoint.take_rows([(each.name, each.size) for each in pieces], inner, dtype)
    widths = inner if columns is None else (columns.stop - columns.start,)
    total = sum(piece.num_taken for piece in pieces)
    rows = torch.empty((total, *widths), dtype=dtype, device=checkpoint.device)
    first = 0
    for piece in pieces:
        for part in piece.taken:
            target = rows[first : first + part.stop - part.start]
            checkpoint.take_part(piece.name, (piece.size, *inner), part, columns, target)
            first += len(target)
    return rows
