"""DeviceStep: a step on a GPU. Nothing of it is read back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tokenmesh.engine.layers.step import NO_MEDIA, HostStep, Step, StepMedia
from tokenmesh.engine.layers.upload import upload
from tokenmesh.kernels.alignment import padded
from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.lora import DeviceAdapterRows
from tokenmesh.kernels.paged_attention import DeviceRows, Rows, span_ends
from tokenmesh.kernels.state_rows import StateRows


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Where a window group's keys and values are."""

    token_slots: torch.Tensor
    """[T] int64"""
    block_tables: torch.Tensor
    """[R, columns] int32"""


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """See `Step`; from tensors that were written on the device. T tokens, R rows."""

    positions: torch.Tensor
    """[T] int64"""
    lengths: torch.Tensor
    """[T] int64"""
    token_slots: torch.Tensor
    """[T] int64, see kv_write."""
    rows: DeviceRows
    windowed: Sequence[GroupTables] = ()
    state_rows: StateRows | None = None
    """None for a model whose rows keep no states."""
    starts: Sequence[int] = ()
    """[R] position of each row's first new token; none while a graph is recorded."""
    counts: Sequence[int] = ()
    """[R] new tokens of each row; none while a graph is recorded."""
    media: StepMedia = NO_MEDIA
    adapters: DeviceAdapterRows | None = None

    @property
    def row_tables(self) -> torch.Tensor:
        return self.rows.block_tables

    def slots(self, _pages: torch.Tensor, group: int = 0) -> torch.Tensor:
        """Alike for pages of any shape."""
        return self.windowed[group - 1].token_slots if group else self.token_slots

    def attention(self, window: int | None, _pages: torch.Tensor, group: int = 0) -> DeviceRows:
        """The rows as layers of one group and window see them."""
        if not group:
            return self.rows.for_window(window)
        tables = self.windowed[group - 1].block_tables
        return replace(self.rows, window=window, block_tables=tables)

    def with_media(self, media: StepMedia) -> "DeviceStep":
        """The same with what the host has of it; its copies do not wait for the device."""
        device, rows, positions = self.rows.cu_q.device, self.rows, media.positions
        if media.spans:
            order = Rows(self.starts, self.counts, torch.empty(0), media.spans)
            rows = replace(rows, ends=upload(span_ends(order).int(), device))
        if positions is not None:
            positions = upload(positions, device)
        return replace(self, rows=rows, media=StepMedia(media.patches, positions, media.spans))


def on_device(step: HostStep, device: torch.device) -> Step:
    """The same step as the device takes it, which waits for the copies: for what is tried on a
    model while it is loaded, and for models that pool. Without adapters.

    Rows of one token must come first.
    """
    if not uses_triton(step.positions.to(device)):
        return step
    counts, groups = step.counts, range(1 + len(step.windowed_tables))
    num_short = sum(count == 1 for count in counts)
    tables = [_aligned(step.rows(group).tables).to(device) for group in groups]
    slots = [step.slots_of(group).to(device) for group in groups]
    states = StateRows.of(list(step.numbers), list(step.starts), list(counts), device)
    lengths = [start + count for start, count in zip(step.starts, counts, strict=True)]
    rows = DeviceRows(
        cu_q=states.cu_q,
        seq_lens=torch.tensor(lengths, dtype=torch.int32).to(device),
        block_tables=tables[0],
        num_short=num_short,
        max_short_query=1,
        num_long_tokens=sum(counts) - num_short,
        num_splits=1,
    )
    return DeviceStep(
        positions=step.positions.to(device),
        lengths=step.lengths.to(device),
        token_slots=slots[0],
        rows=rows,
        windowed=[GroupTables(*each) for each in zip(slots[1:], tables[1:], strict=True)],
        state_rows=states,
        starts=step.starts,
        counts=counts,
    ).with_media(step.media)


def _aligned(tables: torch.Tensor) -> torch.Tensor:
    """[R, columns] int32, in rows as wide as kernels want them."""
    wide = tables.new_zeros((len(tables), padded(tables.shape[1])), dtype=torch.int32)
    wide[:, : tables.shape[1]] = tables
    return wide
