"""StepBuffer: all that a step sends to the device, as views of one flat buffer: one copy."""

from dataclasses import dataclass
from typing import Final, Self

import torch

from tokenmesh.kernels.alignment import MULTIPLE, padded

WRITE_WORDS: Final = 1 << 16
"""int32 words for what changed in the rows; a step that brings more takes a copy of its own."""


@dataclass(frozen=True, slots=True)
class StepBuffer:
    """Host and device have one each, laid out alike, with room for R rows of a batch.

    The device's stays where it is: graphs read their inputs from it.
    """

    flat: torch.Tensor
    """int32 [words]"""
    rows: torch.Tensor
    """int32 [R]: the row of each row of the batch; negative: padding."""
    sampled_rows: torch.Tensor
    """int32 [R]: those of them that draw a token."""
    draws: torch.Tensor
    """int32 [R]: which of these each row of the batch is; negative: it draws nothing."""
    positions: torch.Tensor
    """int64 [R]: how many tokens each row that draws has generated."""
    last_tokens: torch.Tensor
    """int64 [R]: the token of the batch whose logits it draws from."""
    query_starts: torch.Tensor
    """int32 [R + 1]"""
    writes: torch.Tensor
    """int32 [WRITE_WORDS]: destinations, starts and values of `staged_writes`."""

    @staticmethod
    def num_words(num_rows: int) -> int:
        """Size of a buffer."""
        return 8 * padded(num_rows) + MULTIPLE + WRITE_WORDS

    @classmethod
    def of(cls, flat: torch.Tensor, num_rows: int) -> Self:
        """The parts of a buffer. Each begins at a multiple of 16 words."""
        room = padded(num_rows)
        sizes = [room] * 3 + [2 * room] * 2 + [room + MULTIPLE, WRITE_WORDS]
        parts = torch.split(flat, sizes)
        rows, sampled_rows, draws = (part[:num_rows] for part in parts[:3])
        positions, last_tokens = (part.view(torch.int64)[:num_rows] for part in parts[3:5])
        query_starts = parts[5][: num_rows + 1]
        return cls(flat, rows, sampled_rows, draws, positions, last_tokens, query_starts, parts[6])

    def used(self, num_write_words: int) -> torch.Tensor:
        """The part that a copy has to carry."""
        return self.flat[: len(self.flat) - WRITE_WORDS + num_write_words]


def fill(part: torch.Tensor, values: list[int]) -> None:
    """Write the first entries of a part on the host."""
    part[: len(values)] = torch.tensor(values, dtype=part.dtype)
