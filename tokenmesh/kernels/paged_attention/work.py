"""What paged attention needs to know about a step, computed once and used by every layer.

Single-token rows are gathered together, in groups of similar length; longer rows go one by one in
tiles of queries, so that a mask never grows with the square of the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

SCRATCH_BYTES: Final = 8 << 20
"""Keys and values that one decode group may gather at a time; it should stay in the cache."""
MAX_LENGTH_RATIO: Final = 2
"""Longest over shortest row of a decode group: bounds the work spent on padding."""
WIDE_ELEMENTS: Final = 1 << 16
"""Up to this many elements of keys, a bfloat16 group is computed in float32: oneDNN's matmul has
several times the overhead of MKL's, and only pays for it beyond this size."""
QUERY_TILE: Final = 512
"""Queries of a long row that are computed together."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step in batch order: all of one token first, best sorted by start."""

    starts: Sequence[int]
    """Position of each row's first new token."""
    lengths: Sequence[int]
    """New tokens of each row, at least 1."""
    tables: torch.Tensor
    """[rows, max_blocks] int64 block ids; entries past a row's end are the null block."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one token, padded to the same number of pages."""

    tokens: slice
    gather: torch.Tensor
    """[2 * rows * kv_heads * pages] page rows, keys before values."""
    mask: torch.Tensor
    """[rows * kv_heads, 1, keys] 0 or -inf, in the dtype to compute in."""


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Consecutive queries of one row."""

    tokens: slice
    gather: torch.Tensor
    """[2 * kv_heads * pages] page rows, keys before values."""
    num_keys: int
    """Keys to keep of those gathered."""
    mask: torch.Tensor | None
    """[queries, keys] True where a query sees a key; None: plainly causal from key 0."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The work of one step for all layers that share a window."""

    decode: list[DecodeGroup]
    prefill: list[PrefillTile]


def prepare(
    rows: Rows, pages_shape: torch.Size, dtype: torch.dtype, window: int | None
) -> Prepared:
    """Split the step into decode groups and prefill tiles."""
    _, num_blocks, kv_heads, page_size, head_dim = pages_shape
    planes = torch.arange(2).view(2, 1, 1, 1) * (num_blocks * kv_heads)
    heads = torch.arange(kv_heads).view(1, 1, kv_heads, 1)

    def page_rows(table: torch.Tensor) -> torch.Tensor:
        """table [n, pages] -> [2 * n * kv_heads * pages] rows of the pool seen as pages."""
        return (planes + heads + table.view(1, len(table), 1, -1) * kv_heads).flatten()

    num_single = sum(1 for length in rows.lengths if length == 1)
    page_bytes = 2 * kv_heads * page_size * head_dim * dtype.itemsize
    decode = []
    for group in _groups(rows.starts[:num_single], page_size, page_bytes, window):
        table, mask = _decode_keys(rows, group, page_size, window)
        if mask.numel() * kv_heads * head_dim > WIDE_ELEMENTS:
            mask = mask.to(dtype)
        mask = mask.repeat_interleave(kv_heads, dim=0).unsqueeze(1)
        decode.append(DecodeGroup(tokens=group, gather=page_rows(table), mask=mask))

    prefill = []
    token = num_single
    for row in range(num_single, len(rows.starts)):
        start, length = rows.starts[row], rows.lengths[row]
        for offset in range(0, length, QUERY_TILE):
            size = min(QUERY_TILE, length - offset)
            pages, num_keys, seen = _tile_keys(start + offset, size, page_size, window)
            tokens = slice(token + offset, token + offset + size)
            gather = page_rows(rows.tables[row : row + 1, pages])
            prefill.append(PrefillTile(tokens, gather, num_keys, seen))
        token += length
    return Prepared(decode=decode, prefill=prefill)


def _groups(
    starts: Sequence[int], page_size: int, page_bytes: int, window: int | None
) -> list[slice]:
    """Cut single-token rows into runs of similar length that fit the scratch size."""
    groups: list[slice] = []
    first, shortest, longest = 0, 0, 0
    for row, start in enumerate(starts):
        keys = start + 1 if window is None else min(start + 1, window + page_size)
        pages = -(-keys // page_size)
        low, high = (min(shortest, pages), max(longest, pages)) if row > first else (pages, pages)
        too_big = (row - first + 1) * high * page_bytes > SCRATCH_BYTES
        if row > first and (too_big or high > MAX_LENGTH_RATIO * low):
            groups.append(slice(first, row))
            first, low, high = row, pages, pages
        shortest, longest = low, high
    if starts:
        groups.append(slice(first, len(starts)))
    return groups


def _decode_keys(
    rows: Rows, group: slice, page_size: int, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The block table [n, pages] that the group reads, and its mask [n, keys] of 0 and -inf."""
    position = torch.tensor(rows.starts[group]).unsqueeze(1)
    if window is None:
        first_page = torch.zeros_like(position)
    else:
        first_page = (position - window + 1).clamp_(min=0) // page_size
    num_pages = int((position // page_size - first_page).max()) + 1
    columns = first_page + torch.arange(num_pages)
    table = rows.tables[group].gather(1, columns.clamp(max=rows.tables.shape[1] - 1))
    key = first_page * page_size + torch.arange(num_pages * page_size)
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    return table, torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


def _tile_keys(
    start: int, size: int, page_size: int, window: int | None
) -> tuple[slice, int, torch.Tensor | None]:
    """The pages that queries [start, start + size) read, how many keys, and the mask."""
    first = 0 if window is None else max(0, start - window + 1) // page_size
    end = start + size
    pages = slice(first, -(-end // page_size))
    first_key = first * page_size
    if start == 0 and (window is None or window >= size):
        return pages, end, None
    query = torch.arange(start, end).unsqueeze(1)
    key = torch.arange(first_key, end)
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    return pages, end - first_key, seen
