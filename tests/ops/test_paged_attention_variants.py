"""Variants, spans and lse of paged_attention on the CPU, on pages full of NaN but for the rows'."""

from dataclasses import replace

import pytest
import torch

from tests.ops.scattered import BLOCKS, poisoned, scattered
from tokenmesh.kernels.paged_attention import (
    TOLERANCE,
    Rows,
    Variant,
    attention_and_lse_reference,
    paged_attention,
    prepare,
    span_ends,
)

DTYPES = [torch.float32, torch.bfloat16]
STARTS, LENGTHS = [2, 15, 17, 31, 0, 30], [1, 1, 1, 1, 19, 4]
SINKS = torch.tensor([1.0, -2.0, 0.5, 4.0])
FP8 = torch.float8_e4m3fn
VARIANTS = {
    "plain": Variant(),
    "softcap": Variant(softcap=2.0),
    "sinks": Variant(sinks=SINKS),
    "narrow values": Variant(value_dim=9),
    "scales": Variant(k_scale=0.5, v_scale=1.5),
    "everything": Variant(3.0, SINKS, 2.0, 0.5, 9),
}
SPANS: dict[str, Rows] = {
    "images": Rows([3, 0, 12], [1, 20, 25], torch.empty(0), ((3, 9), (9, 15), (21, 40))),
    "whole rows": Rows([0, 0, 0], [1, 20, 33], torch.empty(0), ((0, 1), (1, 21), (21, 54))),
}


def check(
    rows: Rows,
    window: int | None,
    variant: Variant,
    dtype: torch.dtype,
    pages_dtype: torch.dtype | None = None,
    key_dim: int = 14,
    width: int = 14,
) -> None:
    """Output and lse equal the reference's; the output also where no lse is asked for."""
    pages = torch.randn(2, BLOCKS, 2, 8, width).to(pages_dtype or dtype)
    pages = poisoned(pages, rows)
    pages[0, ..., key_dim:] = torch.nan
    pages[1, ..., variant.value_dim or width :] = torch.nan
    query = torch.randn(sum(rows.lengths), 4, key_dim).to(dtype)
    prepared = prepare(rows, pages.shape, pages.dtype, window)
    expected, expected_lse = attention_and_lse_reference(query, pages, rows, 0.3, window, variant)
    lse = torch.full((len(query), 4), torch.nan)
    result = paged_attention(query, pages, prepared, 0.3, variant, lse)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=tolerance, rtol=0)
    result = paged_attention(query, pages, prepared, 0.3, variant)
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_and_lse_equal_the_reference(
    variant: str, window: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    check(scattered(STARTS, LENGTHS, 8), window, VARIANTS[variant], dtype)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(20, 8), (8, 20)])
def test_keys_and_values_of_different_widths(key_dim: int, value_dim: int) -> None:
    torch.manual_seed(0)
    rows = scattered(STARTS, LENGTHS, 8)
    variant = Variant(value_dim=value_dim)
    check(rows, None, variant, torch.float32, key_dim=key_dim, width=20)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", ["plain", "everything"])
def test_pages_in_8_bits_are_widened(variant: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = scattered(STARTS, LENGTHS, 8)
    check(rows, None, VARIANTS[variant], dtype, FP8)


def test_few_scores_at_a_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("tokenmesh.kernels.paged_attention.cpu_variant.SCRATCH_BYTES", 1500)
    rows = scattered([0, 20, 7], [17, 12, 20], 8)
    check(rows, 9, VARIANTS["everything"], torch.float32)
    check(rows, None, VARIANTS["sinks"], torch.float32)


def placed(name: str, is_symmetric: bool) -> Rows:
    """A case of SPANS with block tables."""
    rows = SPANS[name]
    tables = scattered(rows.starts, rows.lengths, 8).tables
    return replace(rows, tables=tables, has_symmetric_window=is_symmetric)


@pytest.mark.parametrize("variant", ["plain", "everything"])
@pytest.mark.parametrize("tile", [7, 512])
@pytest.mark.parametrize(("window", "is_symmetric"), [(None, False), (4, False), (4, True)])
@pytest.mark.parametrize("name", SPANS)
def test_spans_equal_the_reference(
    name: str,
    window: int | None,
    is_symmetric: bool,
    tile: int,
    variant: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("tokenmesh.kernels.paged_attention.work.QUERY_TILE", tile)
    rows = placed(name, is_symmetric)
    check(rows, window, VARIANTS[variant], torch.float32)
    if variant == "plain":
        plain_path(rows, window)


def plain_path(rows: Rows, window: int | None) -> None:
    """Without a variant, as models without one ask."""
    pages = poisoned(torch.randn(2, BLOCKS, 2, 8, 14), rows)
    query = torch.randn(sum(rows.lengths), 4, 14)
    prepared = prepare(rows, pages.shape, torch.float32, window)
    expected, _ = attention_and_lse_reference(query, pages, rows, 0.3, window)
    result = paged_attention(query, pages, prepared, 0.3)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


def test_whole_rows_need_no_mask() -> None:
    rows = placed("whole rows", is_symmetric=False)
    prepared = prepare(rows, torch.Size((2, BLOCKS, 2, 8, 14)), torch.float32, None)
    assert [(tile.mask, tile.is_causal) for tile in prepared.prefill] == [(None, False)] * 2


def test_reference_of_spans_is_torchs() -> None:
    """Images see themselves and what is before them; an encoder's rows see themselves."""
    torch.manual_seed(0)
    images = ((2, 5), (7, 9))
    query, keys, values = torch.randn(3, 2, 10, 6)
    seen = torch.ones(10, 10, dtype=torch.bool).tril()
    for first, end in images:
        seen[first:end, first:end] = True
    distance = torch.arange(10).unsqueeze(1) - torch.arange(10)
    for mask, window, rows in (
        (seen, None, Rows([0], [10], torch.tensor([[1, 0, 2]]), images)),
        (seen & (distance < 2), 2, Rows([0], [10], torch.tensor([[1, 0, 2]]), images)),
        (
            distance.abs() < 3,
            3,
            Rows([0], [10], torch.tensor([[1, 0, 2]]), ((0, 10),), has_symmetric_window=True),
        ),
    ):
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=0.3
        )
        pages = torch.zeros(2, 3, 2, 4, 6)
        for position in range(10):
            block = rows.tables[0, position // 4]
            pages[0, block, :, position % 4] = keys[:, position]
            pages[1, block, :, position % 4] = values[:, position]
        out, _ = attention_and_lse_reference(query.transpose(0, 1), pages, rows, 0.3, window)
        torch.testing.assert_close(out, expected.transpose(0, 1).flatten(1))


def test_rows_without_pages_are_pages_of_one_token() -> None:
    torch.manual_seed(0)
    lengths = [1, 5, 12]
    query, keys, values = torch.randn(18, 4, 6), torch.randn(18, 2, 6), torch.randn(18, 2, 6)
    tables = torch.zeros(3, 12, dtype=torch.int64)
    spans = []
    for row, end in enumerate(torch.tensor(lengths).cumsum(0).tolist()):
        spans.append((end - lengths[row], end))
        tables[row, : lengths[row]] = torch.arange(*spans[-1])
    rows = Rows([0, 0, 0], lengths, tables, tuple(spans))
    pages = torch.stack((keys, values)).unsqueeze(3)
    out = paged_attention(query, pages, prepare(rows, pages.shape, torch.float32, None), 0.3)
    for first, end in spans:
        q, k, v = (x[first:end].transpose(0, 1) for x in (query, keys, values))
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(out[first:end], expected.transpose(0, 1).flatten(1))


def test_span_over_two_rows_is_refused() -> None:
    with pytest.raises(AssertionError, match="a span lies in one row"):
        span_ends(Rows([0, 0], [4, 4], torch.empty(0), ((2, 6),)))
