"""StateRows: whose state an op reads and writes, and which tokens of a step belong to it.

A layer's state is one tensor [slots, ...] that ops change in place. A row keeps its slot from its
first token to its last. The last slot is scratch: rows of padding point at it, all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch

from tokenmesh.kernels.state_rows.span import RowSpan

__all__ = ["RowSpan", "SingleRows", "StateRows"]


@dataclass(frozen=True, slots=True)
class SingleRows:
    """Rows of one token in a step."""

    spans: tuple[RowSpan, ...]
    tokens: torch.Tensor
    """[n] int64"""
    slots: torch.Tensor
    """[n] int64"""


@dataclass(frozen=True)
class StateRows:
    """The rows of a step. Their tokens stand one row after the other and are all tokens there are.

    A graph that was recorded with `longest` fits every step whose rows are not longer.
    """

    slots: torch.Tensor
    """[R] int32 or int64: where each row's state is; equal only where it is scratch."""
    cu_q: torch.Tensor
    """[R + 1] int32: row r has the tokens cu_q[r] to cu_q[r + 1], possibly none."""
    starts: torch.Tensor
    """[R] int32: position of each row's first token. Where it is 0 or less the row has no state:
    whatever the slot holds is not read."""
    longest: int
    """Most tokens of a row, or more: the host's number, so that nothing is read back."""

    @classmethod
    def of(
        cls,
        slots: list[int],
        starts: list[int],
        lengths: list[int],
        device: torch.device | None = None,
    ) -> Self:
        """Rows from the host's numbers."""
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(
            slots=torch.tensor(slots, dtype=torch.int64, device=device),
            cu_q=ends.to(device),
            starts=torch.tensor(starts, dtype=torch.int32, device=device),
            longest=max(lengths, default=0),
        )

    def spans(self) -> Iterator[RowSpan]:
        """The rows that have tokens. Reads the tensors: for those on a CPU."""
        return iter(self._spans)

    @cached_property
    def _spans(self) -> tuple[RowSpan, ...]:
        ends = self.cu_q.tolist()
        rows = zip(self.slots.tolist(), self.starts.tolist(), ends[:-1], ends[1:], strict=True)
        return tuple(
            RowSpan(slot, max(0, start), first, last)
            for slot, start, first, last in rows
            if last > first
        )

    @cached_property
    def single(self) -> SingleRows | None:
        """The rows with one token, the same for all layers of a step; None without such rows."""
        spans = tuple(row for row in self._spans if row.last - row.first == 1)
        if not spans:
            return None
        tokens, slots = ([row.first for row in spans], [row.slot for row in spans])
        return SingleRows(spans, torch.tensor(tokens), torch.tensor(slots))

    @cached_property
    def long(self) -> tuple[RowSpan, ...]:
        """The rows with several tokens."""
        return tuple(row for row in self._spans if row.last - row.first > 1)

    def clear(self, state: torch.Tensor) -> None:
        """Zero the slots of rows that have no state yet: what is there may be NaN."""
        for row in self._spans:
            if row.start == 0:
                state[row.slot].zero_()
