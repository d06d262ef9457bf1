"""paged_attention and kv_write against their references, on scattered pages."""

from collections.abc import Sequence

import pytest
import torch

from tokenmesh.kernels.kv_write import kv_write, kv_write_reference, slot_rows
from tokenmesh.kernels.paged_attention import (
    TOLERANCE,
    Rows,
    paged_attention,
    paged_attention_reference,
    prepare,
)

DTYPES = [torch.float32, torch.bfloat16]
BLOCKS = 64

ROWS: dict[str, tuple[list[int], list[int]]] = {
    "one token": ([0], [1]),
    "decode": ([4, 17, 18, 40], [1, 1, 1, 1]),
    "whole prompts": ([0, 0], [5, 33]),
    "chunks": ([16, 3], [7, 20]),
    "mixed": ([2, 15, 50, 0, 30], [1, 1, 1, 9, 4]),
}


def scattered(starts: Sequence[int], lengths: Sequence[int], page_size: int) -> Rows:
    """Rows whose blocks are all over the pool."""
    order = (torch.randperm(BLOCKS - 1) + 1).tolist()
    counts = [-(-(s + n) // page_size) for s, n in zip(starts, lengths, strict=True)]
    tables = torch.zeros(len(starts), max(counts), dtype=torch.int64)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    return Rows(starts, lengths, tables)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 6, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 12), (3, 1, 14), (2, 2, 64)])
@pytest.mark.parametrize("case", ROWS)
def test_attention_equals_the_reference(
    case: str, heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    starts, lengths = ROWS[case]
    rows = scattered(starts, lengths, 8)
    pages = torch.randn(2, BLOCKS, kv_heads, 8, head_dim).to(dtype)
    query = torch.randn(sum(lengths), heads, head_dim).to(dtype)
    scale = head_dim**-0.5
    expected = paged_attention_reference(query, pages, rows, scale, window)
    prepared = prepare(rows, pages.shape, dtype, window)
    result = paged_attention(query, pages, prepared, scale)
    torch.testing.assert_close(result, expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("window", [None, 9])
def test_small_tiles_and_groups_change_nothing(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("tokenmesh.kernels.paged_attention.work.QUERY_TILE", 4)
    monkeypatch.setattr("tokenmesh.kernels.paged_attention.work.SCRATCH_BYTES", 4000)
    starts, lengths = [1, 9, 9, 30, 31, 0, 11], [1, 1, 1, 1, 1, 23, 6]
    rows = scattered(starts, lengths, 8)
    pages = torch.randn(2, BLOCKS, 2, 8, 10)
    query = torch.randn(sum(lengths), 4, 10)
    prepared = prepare(rows, pages.shape, torch.float32, window)
    assert len(prepared.decode) > 2
    assert len(prepared.prefill) == 6 + 2
    expected = paged_attention_reference(query, pages, rows, 0.3, window)
    result = paged_attention(query, pages, prepared, 0.3)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


def test_nobody_sees_pages_of_others_or_positions_to_come() -> None:
    torch.manual_seed(0)
    starts, lengths = [5, 20, 3], [1, 1, 6]
    rows = scattered(starts, lengths, 8)
    pages = torch.randn(2, BLOCKS, 2, 8, 12)
    query = torch.randn(8, 4, 12)
    prepared = prepare(rows, pages.shape, torch.float32, None)
    before = paged_attention(query, pages, prepared, 0.3)
    seen = torch.zeros(BLOCKS, 8, dtype=torch.bool)
    for start, length, table in zip(starts, lengths, rows.tables.tolist(), strict=True):
        for position in range(start + length):
            seen[table[position // 8], position % 8] = True
    other = torch.where(seen.view(1, BLOCKS, 1, 8, 1), pages, torch.full_like(pages, 1e3))
    torch.testing.assert_close(paged_attention(query, other, prepared, 0.3), before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 9])
def test_kv_write_equals_the_reference(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(0)
    pages = torch.randn(2, 7, 3, 4, 10).to(dtype)
    expected = pages.clone()
    cells = torch.randperm(28)[:tokens]
    buffer = torch.randn(tokens, 5 + 6, 10).to(dtype)
    slots = slot_rows(cells // 4, cells % 4, pages.shape)
    kv_write(buffer[:, 5:], pages, slots)
    pairs = [(cell // 4, cell % 4) for cell in cells.tolist()]
    kv_write_reference(buffer[:, 5:], expected, pairs)
    assert torch.equal(pages, expected)
