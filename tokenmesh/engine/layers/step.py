"""Step: what all layers of one forward pass share, whatever the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple, Protocol

import torch

from tokenmesh.kernels.kv_write import slot_rows
from tokenmesh.kernels.lora import AdapterRows, DeviceAdapterRows
from tokenmesh.kernels.paged_attention import DeviceRows, Prepared, Rows, prepare
from tokenmesh.kernels.state_rows import StateRows


class Patch(NamedTuple):
    """Embeddings for tokens of a batch."""

    tokens: slice
    values: torch.Tensor
    """[length, width]; the first hidden size of them is the embedding itself."""
    adds: bool = False
    """It tells whether they are added to the tokens' own embeddings instead of replacing them."""

    def apply(self, hidden: torch.Tensor) -> None:
        """Write to embeddings hidden [T, hidden]."""
        values = self.values[:, : hidden.shape[1]].to(hidden)
        if self.adds:
            hidden[self.tokens] += values
        else:
            hidden[self.tokens] = values


@dataclass(frozen=True, slots=True)
class StepMedia:
    """It holds what a step brings besides tokens, for models with such needs, see `MediaFacts`."""

    patches: Sequence[Patch] = ()
    """Those that `embed` was given."""
    positions: torch.Tensor | None = None
    """[position_rows, T] int64 or float32 for the rope; None: `Step.positions` in every row."""
    spans: Sequence[tuple[int, int]] = ()
    """First token and end of runs of tokens that see each other both ways, ascending."""


NO_MEDIA: Final = StepMedia()


class Step(Protocol):
    """The rows of a step, in batch order. T tokens, R rows."""

    @property
    def positions(self) -> torch.Tensor: ...

    @property
    def lengths(self) -> torch.Tensor:
        """[T] length of the sequence that each token was first computed in."""

    @property
    def token_slots(self) -> torch.Tensor:
        """[T] int64 block * page_size + offset, of the first KV group."""

    @property
    def starts(self) -> Sequence[int]:
        """[R] position of each row's first new token; empty while a graph is recorded."""

    @property
    def counts(self) -> Sequence[int]:
        """[R] new tokens of each row; empty while a graph is recorded."""

    @property
    def row_tables(self) -> torch.Tensor:
        """[R, columns] block ids of the first KV group; read only those that a row's tokens use."""

    @property
    def state_rows(self) -> StateRows | None:
        """For ops over states, whose slots are row numbers."""

    @property
    def media(self) -> StepMedia: ...

    @property
    def adapters(self) -> AdapterRows | DeviceAdapterRows | None:
        """The tokens that have adapters; None: none has."""

    def slots(self, pages: torch.Tensor, group: int = 0) -> torch.Tensor:
        """Where new keys and values go in a KV group's pages of this shape, see `kv_write`."""

    def attention(
        self, window: int | None, pages: torch.Tensor, group: int = 0
    ) -> Prepared | DeviceRows:
        """The work of a KV group's layers of one window over pages of this shape."""


@dataclass(frozen=True)
class HostStep:
    """A step on a CPU. What not every model needs is computed on first use."""

    starts: Sequence[int]
    """[R] position of each row's first new token."""
    counts: Sequence[int]
    """[R] new tokens of each row."""
    numbers: Sequence[int]
    """[R] number of each row."""
    all_tables: torch.Tensor
    """[*, max_blocks] int64 block ids by row number; past a row's end there is the null block."""
    page_size: int
    token_lengths: Sequence[int]
    """[T], see `Step.lengths`."""
    windowed_tables: Sequence[torch.Tensor] = ()
    """Likewise for each window group; what is behind the window may hold any block."""
    media: StepMedia = NO_MEDIA
    adapters: AdapterRows | None = None
    _rows: dict[int, Rows] = field(default_factory=dict)
    _slots: dict[tuple[int, torch.Size], torch.Tensor] = field(default_factory=dict)
    _prepared: dict[tuple[int | None, torch.Size, int], Prepared] = field(default_factory=dict)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest row once this step is computed."""
        return max(start + count for start, count in zip(self.starts, self.counts, strict=True))

    @cached_property
    def positions(self) -> torch.Tensor:
        if self.is_decode:
            return torch.tensor(self.starts)
        spans = zip(self.starts, self.counts, strict=True)
        return torch.cat([torch.arange(start, start + count) for start, count in spans])

    @cached_property
    def lengths(self) -> torch.Tensor:
        return torch.tensor(self.token_lengths)

    @property
    def is_decode(self) -> bool:
        """Return whether every row has one token."""
        return len(self.counts) == len(self.token_lengths)

    def tables(self, group: int) -> torch.Tensor:
        """[*, max_blocks] block ids of a KV group by row number, see `all_tables`."""
        return self.windowed_tables[group - 1] if group else self.all_tables

    def rows(self, group: int) -> Rows:
        """The rows with the part of a group's block tables that is in use."""
        rows = self._rows.get(group)
        if rows is None:
            num_columns = -(-self.longest // self.page_size)
            in_use = self.tables(group)[torch.tensor(self.numbers), :num_columns]
            rows = self._rows[group] = Rows(self.starts, self.counts, in_use, self.media.spans)
        return rows

    @cached_property
    def token_rows(self) -> torch.Tensor:
        """[T] int64 index into `rows` of each token."""
        rows = torch.arange(len(self.counts))
        return rows if self.is_decode else rows.repeat_interleave(torch.tensor(self.counts))

    def slots(self, pages: torch.Tensor, group: int = 0) -> torch.Tensor:
        """[T, 2 * kv_heads], see `Step.slots`."""
        key = (group, pages.shape)
        slots = self._slots.get(key)
        if slots is None:
            slots = slot_rows(self._blocks(group), self.positions % self.page_size, pages.shape)
            self._slots[key] = slots
        return slots

    @property
    def row_tables(self) -> torch.Tensor:
        return self.rows(0).tables

    @cached_property
    def token_slots(self) -> torch.Tensor:
        return self.slots_of(0)

    def slots_of(self, group: int) -> torch.Tensor:
        """[T] int64 block * page_size + offset, of a KV group."""
        return self._blocks(group) * self.page_size + self.positions % self.page_size

    @cached_property
    def state_rows(self) -> StateRows:
        return StateRows.of(list(self.numbers), list(self.starts), list(self.counts))

    def _blocks(self, group: int) -> torch.Tensor:
        """[T] block of each token."""
        return self.rows(group).tables[self.token_rows, self.positions // self.page_size]

    def attention(self, window: int | None, pages: torch.Tensor, group: int = 0) -> Prepared:
        """The result is shared by all layers with the same arguments; see `Step.attention`."""
        key = (window, pages.shape, group)
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = prepare(self.rows(group), pages.shape, pages.dtype, window)
            self._prepared[key] = prepared
        return prepared
