"""The work of paged attention in a step, computed once and used by every layer.

Single-token rows are gathered together, in groups of similar length; longer rows go one by one in
tiles of queries, so that a mask never grows with the square of the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch

from tokenmesh.kernels.page_codes import row_width

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
    spans: Sequence[tuple[int, int]] = ()
    """First token and end of runs of the step's tokens that see each other both ways, each within
    a row and in ascending order; a bidirectional row is one span. A window limits what they see
    behind them."""
    has_symmetric_window: bool = False
    """A window limits what spans see ahead of them too, to as many positions."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one token, padded to the same number of pages."""

    tokens: slice
    gather: torch.Tensor
    """[planes * rows * kv_heads * pages] page rows, keys before values."""
    gathered: torch.Tensor
    """[planes * rows * kv_heads * pages, a page's elements] where the pages are gathered; of the
    pages' dtype, 8 bits as uint8. Groups share its memory."""
    tails: list[torch.Tensor]
    """The parts of `gathered` behind the rows' last tokens: they may hold anything."""
    wide: torch.Tensor | None
    """The keys and values of `gathered` in the dtype to compute in; None: it is the same."""
    keys: torch.Tensor
    """[rows * kv_heads, head_dim, keys], a view of the one to compute with."""
    values: torch.Tensor
    """[rows * kv_heads, keys, head_dim], likewise."""
    mask: torch.Tensor
    """[rows * kv_heads, 1, keys] 0 or -inf, in the dtype to compute in."""


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Consecutive queries of one row."""

    tokens: slice
    gather: torch.Tensor
    """[planes * kv_heads * pages] page rows, keys before values."""
    num_keys: int
    """Keys to keep of those gathered."""
    mask: torch.Tensor | None
    """[queries, num_keys] True where a query sees a key; None: see `is_causal`."""
    is_causal: bool
    """Without a mask: query i sees the keys up to i; else every query sees every key."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The work of one step for all layers that share a window."""

    decode: list[DecodeGroup]
    prefill: list[PrefillTile]
    rows: Rows


def prepare(
    rows: Rows, pages_shape: torch.Size, dtype: torch.dtype, window: int | None
) -> Prepared:
    """Split the step into decode groups and prefill tiles.

    dtype is the pages'. What is prepared has room for keys, so one step at a time uses it. Pages
    of one plane, [1, blocks, ...], hold keys whose first numbers are the values.
    """
    num_single = sum(1 for length in rows.lengths if length == 1)
    page_bytes = pages_shape[0] * pages_shape[2] * pages_shape[3] * pages_shape[4] * dtype.itemsize
    groups = _groups(rows.starts[:num_single], pages_shape[3], page_bytes, window)
    decode = _decode(rows, groups, pages_shape, dtype, window)
    ends = span_ends(rows) if rows.spans else None
    prefill = []
    token = num_single
    for row in range(num_single, len(rows.starts)):
        for offset in range(0, rows.lengths[row], QUERY_TILE):
            size = min(QUERY_TILE, rows.lengths[row] - offset)
            tokens = slice(token + offset, token + offset + size)
            limits = None if ends is None else ends[tokens]
            prefill.append(_tile(rows, row, offset, tokens, pages_shape, window, limits))
        token += rows.lengths[row]
    return Prepared(decode=decode, prefill=prefill, rows=rows)


def span_ends(rows: Rows) -> torch.Tensor:
    """[T] int64: the position after the last one that each token sees, but for the window."""
    positions = [
        torch.arange(start, start + length)
        for start, length in zip(rows.starts, rows.lengths, strict=True)
    ]
    ends = torch.cat(positions) + 1
    for first, end in rows.spans:
        assert int(ends[end - 1] - ends[first]) == end - 1 - first, "a span lies in one row"
        ends[first:end] = ends[end - 1].clone()
    return ends


@lru_cache(maxsize=64)
def _head_rows(num_planes: int, num_blocks: int, kv_heads: int) -> torch.Tensor:
    """[planes, 1, kv_heads, 1] where heads of keys and values begin in the pool seen as pages."""
    planes = torch.arange(num_planes).view(-1, 1, 1, 1) * (num_blocks * kv_heads)
    return planes + torch.arange(kv_heads).view(1, 1, kv_heads, 1)


def _page_rows(table: torch.Tensor, pages_shape: torch.Size) -> torch.Tensor:
    """table [n, pages] -> [planes * n * kv_heads * pages] rows of the pool seen as pages."""
    heads = _head_rows(*pages_shape[:3])
    return (heads + (table * pages_shape[2]).view(1, len(table), 1, -1)).flatten()


def _decode(
    rows: Rows,
    groups: list[slice],
    pages_shape: torch.Size,
    dtype: torch.dtype,
    window: int | None,
) -> list[DecodeGroup]:
    planes, _, kv_heads, page_size, elements = pages_shape
    head_dim = row_width(elements, dtype)
    keys = [_decode_keys(rows, group, page_size, window) for group in groups]
    most = max((mask.numel() for _, mask, _ in keys), default=0)
    stored = torch.uint8 if dtype.itemsize == 1 else dtype
    scratch = torch.empty(planes * most * kv_heads * elements, dtype=stored)
    decode = []
    for tokens, (table, mask, ends) in zip(groups, keys, strict=True):
        num_rows = mask.numel() * kv_heads
        gathered = scratch[: planes * num_rows * elements].view(-1, page_size * elements)
        wide = None
        if num_rows * head_dim > WIDE_ELEMENTS and dtype.itemsize > 1:
            mask = mask.to(dtype)
        if mask.dtype != dtype:
            wide = torch.empty(len(gathered), page_size * head_dim, dtype=mask.dtype)
        both = gathered if wide is None else wide
        by_row = both.view(planes, -1, mask.shape[1], head_dim)
        group = DecodeGroup(
            tokens=tokens,
            gather=_page_rows(table, pages_shape),
            gathered=gathered,
            tails=_tails(gathered.view(planes, len(ends), kv_heads, -1, elements), ends),
            wide=wide,
            keys=by_row[0].transpose(1, 2),
            values=by_row[-1],
            mask=mask.repeat_interleave(kv_heads, dim=0).unsqueeze(1),
        )
        decode.append(group)
    return decode


def _tails(gathered: torch.Tensor, ends: list[int]) -> list[torch.Tensor]:
    """gathered [planes, n, kv_heads, keys, *] -> its parts from each row's end on."""
    num_keys = gathered.shape[3]
    return [
        row.narrow(2, end, num_keys - end)
        for row, end in zip(gathered.unbind(1), ends, strict=True)
        if end < num_keys
    ]


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
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """The block table [n, pages] that the group reads, its mask [n, keys] of 0 and -inf, and where
    each row's keys end."""
    starts = rows.starts[group]
    first_pages = [
        0 if window is None else max(0, start - window + 1) // page_size for start in starts
    ]
    ends = [s + 1 - p * page_size for s, p in zip(starts, first_pages, strict=True)]
    num_pages = -(-max(ends) // page_size)
    if window is None:
        table = rows.tables[group, :num_pages]
    else:
        columns = torch.tensor(first_pages).unsqueeze(1) + torch.arange(num_pages)
        table = rows.tables[group].gather(1, columns.clamp(max=rows.tables.shape[1] - 1))
    key, end = torch.arange(num_pages * page_size), torch.tensor(ends).unsqueeze(1)
    hidden = key >= end
    if window is not None:
        hidden |= key < end - window
    return table, torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf")), ends


def _tile(
    rows: Rows,
    row: int,
    offset: int,
    tokens: slice,
    pages_shape: torch.Size,
    window: int | None,
    limits: torch.Tensor | None,
) -> PrefillTile:
    """Tokens of a row from `offset` on; token i of them sees no key from limits[i] on, without
    limits none after its own."""
    start, size = rows.starts[row] + offset, tokens.stop - tokens.start
    if limits is not None and window is not None and rows.has_symmetric_window:
        limits = limits.minimum(torch.arange(start, start + size) + window)
    end = start + size if limits is None else int(limits.max())
    first_page = 0 if window is None else max(0, start - window + 1) // pages_shape[3]
    first_key = first_page * pages_shape[3]
    columns = slice(first_page, -(-end // pages_shape[3]))
    gather = _page_rows(rows.tables[row : row + 1, columns], pages_shape)
    if limits is None and start == 0 and (window is None or window >= size):
        return PrefillTile(tokens, gather, end, None, is_causal=True)
    query = torch.arange(start, start + size).unsqueeze(1)
    key = torch.arange(first_key, end)
    seen = key <= query if limits is None else key < limits.unsqueeze(1)
    if window is not None:
        seen &= key > query - window
    is_whole = limits is not None and bool(seen.all())
    mask = None if is_whole else seen
    return PrefillTile(tokens, gather, end - first_key, mask, is_causal=False)
