"""Tests of paged attention besides its cases: its reference, its limits, its invariances."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.interpreter import Interpreter
from tests.ops.merged import merged
from tokenmesh.kernels.paged_attention import (
    DeviceRows,
    Rows,
    Variant,
    attention_and_lse_reference,
    choose_splits,
    paged_attention,
)
from tokenmesh.kernels.paged_attention.device import MIN_SPLIT_KEYS, TARGET_PROGRAMS

KEYS = 24
ROWS = Rows([KEYS - 1], [1], torch.tensor([[2, 0, 1]]))


def one_row(heads: int = 4, kv_heads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """query [1, heads, 16] and pages of 8 for one row of 24 keys."""
    torch.manual_seed(0)
    return torch.randn(1, heads, 16), torch.randn(2, 3, kv_heads, 8, 16)


def gathered(pages: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [heads, 24, 16] of ROWS in order."""
    keys, values = pages[:, ROWS.tables[0]].transpose(1, 2).flatten(2, 3)
    group = heads // pages.shape[2]
    return keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)


def test_reference_of_plain_attention_is_torchs() -> None:
    query, pages = one_row()
    keys, values = gathered(pages, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), keys, values, scale=0.3
    )
    out, lse = attention_and_lse_reference(query, pages, ROWS, 0.3, None)
    torch.testing.assert_close(out, expected.transpose(0, 1).flatten(1))
    logits = torch.einsum("hd,hsd->hs", query[0], keys) * 0.3
    torch.testing.assert_close(lse[0], logits.logsumexp(-1))


def test_reference_of_a_sink_is_a_key_whose_value_is_zero() -> None:
    query, pages = one_row()
    sinks = torch.tensor([2.0, -1.0, 0.0, 5.0])
    keys, values = gathered(pages, 4)
    logits = torch.einsum("hd,hsd->hs", query[0], keys) * 0.3
    weights = torch.cat([logits, sinks.unsqueeze(1)], 1).softmax(-1)
    expected = torch.einsum("hs,hsd->hd", weights[:, :-1], values)
    out, _ = attention_and_lse_reference(query, pages, ROWS, 0.3, None, Variant(sinks=sinks))
    torch.testing.assert_close(out, expected.view(1, -1))


def test_reference_of_a_softcap_bounds_logits_and_keeps_small_ones() -> None:
    query, pages = one_row()
    _, plain = attention_and_lse_reference(query, pages, ROWS, 0.3, None)
    _, loose = attention_and_lse_reference(query, pages, ROWS, 0.3, None, Variant(softcap=1e4))
    torch.testing.assert_close(loose, plain)
    _, tight = attention_and_lse_reference(query, pages, ROWS, 30.0, None, Variant(softcap=0.5))
    middle = torch.tensor(float(KEYS)).log()
    assert (tight - middle).abs().max() <= 0.5


def test_reference_of_scales_is_that_of_scaled_pages() -> None:
    query, pages = one_row()
    variant = Variant(k_scale=0.25, v_scale=2.0)
    out, lse = attention_and_lse_reference(query, pages, ROWS, 0.3, None, variant)
    scaled = pages * torch.tensor([0.25, 2.0]).view(2, 1, 1, 1, 1)
    expected, expected_lse = attention_and_lse_reference(query, scaled, ROWS, 0.3, None)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("cut", [1, 8, 23])
def test_attention_over_two_parts_of_the_keys_merges_into_the_whole(cut: int) -> None:
    query, pages = one_row()
    sinks = Variant(sinks=torch.tensor([1.0, 2.0, 3.0, -4.0]))
    early = Rows([cut - 1], [1], ROWS.tables)
    late = attention_and_lse_reference(query, pages, ROWS, 0.3, KEYS - cut)
    first = attention_and_lse_reference(query, pages, early, 0.3, None, sinks)
    expected = attention_and_lse_reference(query, pages, ROWS, 0.3, None, sinks)
    out, lse = merged(*first, *late)
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected[1])


@given(st.integers(0, 2000), st.integers(1, 16), st.integers(0, 200_000))
def test_splits_fill_the_device_but_never_shrink_below_what_pays(
    num_rows: int, kv_heads: int, max_keys: int
) -> None:
    splits = choose_splits(num_rows, kv_heads, max_keys)
    assert splits >= 1
    if splits > 1:
        assert (splits - 1) * MIN_SPLIT_KEYS < max_keys
        assert (splits - 1) * num_rows * kv_heads < TARGET_PROGRAMS
    if num_rows and max_keys >= TARGET_PROGRAMS * MIN_SPLIT_KEYS:
        assert splits * num_rows * kv_heads >= TARGET_PROGRAMS


def device_rows(
    lengths: list[int], tables: torch.Tensor, num_splits: int, num_short: int
) -> DeviceRows:
    """Rows of 2 new tokens each."""
    queries = torch.arange(len(lengths) + 1, dtype=torch.int32) * 2
    return DeviceRows(
        cu_q=queries,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=tables,
        num_short=num_short,
        max_short_query=2,
        num_long_tokens=2 * (len(lengths) - num_short),
        num_splits=num_splits,
    )


def alone_and_together(num_splits: int, are_short: bool) -> None:
    """Assert that no bit of a row's result depends on the other rows."""
    torch.manual_seed(0)
    lengths = [300, 2, 129, 64]
    pages = torch.randn(2, 25, 1, 16, 16)
    query = torch.randn(8, 3, 16)
    tables = torch.randint(1, 25, (4, 32), dtype=torch.int32)

    def run(rows: slice) -> torch.Tensor:
        chosen = lengths[rows]
        num_short = len(chosen) if are_short else 0
        step = device_rows(chosen, tables[rows], num_splits, num_short)
        return paged_attention(query[2 * rows.start : 2 * rows.stop], pages, step, 0.3)

    together = run(slice(0, 4))
    alone = torch.cat([run(slice(row, row + 1)) for row in range(4)])
    assert torch.equal(together, alone)


@pytest.mark.timeout(120)  # the first case waits for the child to import torch
@pytest.mark.parametrize(("num_splits", "are_short"), [(1, True), (3, True), (1, False)])
def test_row_has_the_same_bits_alone_and_in_a_batch(
    num_splits: int, are_short: bool, interpreter: Interpreter
) -> None:
    pytest.importorskip("triton")
    interpreter.call(alone_and_together, num_splits, are_short, timeout_s=100)
