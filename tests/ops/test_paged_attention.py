"""paged_attention and kv_write against their references, on scattered pages."""

import pytest
import torch

from tests.ops.scattered import BLOCKS, poisoned, scattered
from tokenmesh.kernels.kv_write import kv_write, kv_write_reference, slot_rows
from tokenmesh.kernels.paged_attention import (
    TOLERANCE,
    paged_attention,
    paged_attention_reference,
    prepare,
)

DTYPES = [torch.float32, torch.bfloat16]

ROWS: dict[str, tuple[list[int], list[int]]] = {
    "one token": ([0], [1]),
    "decode": ([4, 17, 18, 40], [1, 1, 1, 1]),
    "whole prompts": ([0, 0], [5, 33]),
    "chunks": ([16, 3], [7, 20]),
    "mixed": ([2, 15, 50, 0, 30], [1, 1, 1, 9, 4]),
}


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
    pages = poisoned(torch.randn(2, BLOCKS, kv_heads, 8, head_dim).to(dtype), rows)
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
    pages = poisoned(torch.randn(2, BLOCKS, 2, 8, 10), rows)
    query = torch.randn(sum(lengths), 4, 10)
    prepared = prepare(rows, pages.shape, torch.float32, window)
    assert len(prepared.decode) > 2
    assert len(prepared.prefill) == 6 + 2
    expected = paged_attention_reference(query, pages, rows, 0.3, window)
    result = paged_attention(query, pages, prepared, 0.3)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [12, 256])
def test_nan_in_slots_that_no_row_owns_changes_nothing(dtype: torch.dtype, head_dim: int) -> None:
    torch.manual_seed(0)
    starts, lengths = [0, 5, 15, 20, 3], [1, 1, 1, 1, 6]
    rows = scattered(starts, lengths, 8)
    pages = torch.randn(2, BLOCKS, 2, 8, head_dim).to(dtype)
    query = torch.randn(10, 4, head_dim).to(dtype)
    prepared = prepare(rows, pages.shape, dtype, None)
    assert any(group.tails for group in prepared.decode)
    before = paged_attention(query, pages, prepared, 0.3)
    kept = poisoned(pages, rows)
    again = kept.clone()
    torch.testing.assert_close(paged_attention(query, kept, prepared, 0.3), before)
    assert torch.equal(kept.isnan(), again.isnan()), "pages are only read"


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
