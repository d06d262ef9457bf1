"""Attention and KV writes of the C kernels: right, and the same bits for every tile."""

from dataclasses import replace

import pytest
import torch

from tests.ops.native import in_avx2, in_avx2_too_slowly, needs_native
from tokenmesh.kernels.native import Kind, Op, Program, ProgramInputs, ProgramModel
from tokenmesh.kernels.paged_attention import (
    PLAIN,
    TOLERANCE,
    Rows,
    Variant,
    paged_attention_reference,
)

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(4, 4, 64), (2, 1, 16), (3, 1, 80), (14, 2, 48), (8, 1, 256), (5, 5, 128)]
"""Heads, kv heads, head_dim: groups of 1 to 8 queries, and dims that fill no whole register."""
ROWS: dict[str, tuple[list[int], list[int]]] = {
    "one token": ([0], [1]),
    "decode": ([4, 17, 31, 200], [1, 1, 1, 1]),
    "chunks": ([0, 16, 3], [33, 7, 20]),
    "mixed": ([50, 15, 0, 30], [1, 1, 9, 4]),
}
BLOCKS, SCALE = 64, 0.3
SINKS = torch.linspace(4, -2, 14)
VARIANTS = {
    "softcap": Variant(softcap=1.5),
    "sinks": Variant(sinks=SINKS),
    "both": Variant(softcap=20.0, sinks=SINKS),
}

pytestmark = needs_native


class Case:
    """Rows whose blocks are all over a pool of noise, and their new tokens."""

    def __init__(
        self, name: str, shape: tuple[int, int, int], page_size: int, dtype: torch.dtype
    ) -> None:
        torch.manual_seed(0)
        self.starts, self.counts = ROWS[name]
        heads, kv_heads, dim = shape
        self.model = ProgramModel(dtype == torch.bfloat16, heads, kv_heads, dim)
        self.pages = torch.randn(2, BLOCKS, kv_heads, page_size, dim).to(dtype)
        self.qkv = torch.randn(sum(self.counts), (heads + 2 * kv_heads) * dim).to(dtype)
        self.tables = torch.stack([torch.randperm(BLOCKS - 1) + 1 for _ in range(9)])
        # rows share no block: each has its own part of one order
        order = torch.randperm(BLOCKS - 1) + 1
        self.numbers = [5, 2, 7, 0][: len(self.starts)]
        for row, number in enumerate(self.numbers):
            own = order[row * 15 : (row + 1) * 15]
            self.tables[number] = own.repeat(5)[: BLOCKS - 1]

    def run(
        self,
        window: int | None,
        starts: list[int],
        counts: list[int],
        variant: Variant = PLAIN,
        group: int = 0,
    ) -> torch.Tensor:
        """[T, H * D] of these tokens of the rows; keys and values are written.

        group: the KV group that has the rows' tables; those of all before it are out of order.
        """
        heads, kv_heads, dim = self.model.heads, self.model.kv_heads, self.model.head_dim
        queries = heads * dim
        first = {number: (s, n) for number, s, n in zip(self.numbers, starts, counts, strict=True)}
        tokens = [
            base + start - own + i
            for base, own, (start, count) in zip(
                self.bases(), self.starts, first.values(), strict=True
            )
            for i in range(count)
        ]
        hidden = self.qkv[tokens].clone()
        write = Op(kind=Kind.KV_WRITE, width=2 * kv_heads * dim, offset=queries, group=group)
        attend = Op(
            kind=Kind.ATTENTION,
            group=group,
            window=window or 0,
            value=SCALE,
            softcap=variant.softcap or 0,
            weight=None if variant.sinks is None else variant.sinks.data_ptr(),
        )
        program = Program(self.model, [write, attend], [hidden.shape[1]], [])
        tables = [*[self.tables.flip(1)] * group, self.tables]
        inputs = ProgramInputs(starts, counts, self.numbers, tables, [], None)
        program.run(hidden, inputs, self.pages.unsqueeze(0))
        # a tile's result may take its queries' place
        return hidden[:, :queries]

    def bases(self) -> list[int]:
        """Each row's first token in qkv."""
        return [sum(self.counts[:row]) for row in range(len(self.counts))]

    def written(self) -> torch.Tensor:
        """The pages as they must be once the new tokens are in them."""
        heads, kv_heads, dim = self.model.heads, self.model.kv_heads, self.model.head_dim
        pages, size = self.pages.clone(), self.pages.shape[3]
        keys_values = self.qkv[:, heads * dim :].view(-1, 2, kv_heads, dim)
        rows = zip(self.starts, self.counts, self.bases(), self.numbers, strict=True)
        for start, count, base, number in rows:
            for i in range(count):
                column, offset = divmod(start + i, size)
                pages[:, self.tables[number, column], :, offset] = keys_values[base + i]
        return pages

    def expected(self, window: int | None, variant: Variant = PLAIN) -> torch.Tensor:
        """By the reference, from pages that hold everything."""
        heads, dim = self.model.heads, self.model.head_dim
        query = self.qkv[:, : heads * dim].view(-1, heads, dim)
        rows = Rows(self.starts, self.counts, self.tables[self.numbers])
        if variant.sinks is not None:
            variant = replace(variant, sinks=variant.sinks[:heads])
        return paged_attention_reference(query, self.pages, rows, SCALE, window, variant)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 6, 100])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ROWS)
@in_avx2_too_slowly
def test_it_equals_the_reference(
    name: str, shape: tuple[int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    case = Case(name, shape, 16, dtype)
    pages = case.written()
    result = case.run(window, case.starts, case.counts)
    assert torch.equal(case.pages, pages)
    torch.testing.assert_close(result, case.expected(window), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize("name", ["decode", "mixed"])
@in_avx2_too_slowly
def test_softcaps_and_sinks_equal_the_reference(
    name: str, kind: str, shape: tuple[int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    case = Case(name, shape, 16, dtype)
    case.pages = case.written()
    result = case.run(window, case.starts, case.counts, VARIANTS[kind])
    expected = case.expected(window, VARIANTS[kind])
    torch.testing.assert_close(result, expected, atol=TOLERANCE[dtype], rtol=0)
    assert not torch.allclose(expected, case.expected(window), atol=3 * TOLERANCE[dtype])


def test_a_softcap_far_above_the_scores_changes_nothing() -> None:
    case = Case("chunks", (4, 4, 64), 16, torch.float32)
    case.pages = case.written()
    result = case.run(None, case.starts, case.counts, Variant(softcap=1e4))
    torch.testing.assert_close(result, case.expected(None), atol=TOLERANCE[torch.float32], rtol=0)


def test_a_sink_of_minus_infinity_counts_nothing_and_nan_reaches_the_result() -> None:
    case = Case("mixed", (2, 1, 16), 16, torch.float32)
    plain = case.run(None, case.starts, case.counts)
    none = Variant(sinks=torch.tensor([-torch.inf, -torch.inf]))
    assert torch.equal(case.run(None, case.starts, case.counts, none), plain)
    broken = Variant(sinks=torch.tensor([0.0, torch.nan]))
    result = case.run(None, case.starts, case.counts, broken)
    assert result[:, :16].isfinite().all()
    assert result[:, 16:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["decode", "chunks"])
@in_avx2
def test_a_score_that_is_nan_reaches_the_result(
    name: str, broken: float, dtype: torch.dtype
) -> None:
    case = Case(name, (2, 1, 16), 16, dtype)
    # one key of the last row; its value stays finite
    case.qkv[-1, 2 * 16] = broken
    case.qkv[-1, 0] = case.qkv[-1, 16] = 1.0
    case.pages = case.written()
    result = case.run(None, case.starts, case.counts)
    assert case.expected(None)[-1].isnan().all()
    assert result[-1].isnan().all()
    assert result[: -case.counts[-1]].isfinite().all()


@pytest.mark.parametrize("page_size", [5, 8, 32])
@pytest.mark.parametrize("name", ["decode", "chunks"])
@in_avx2
def test_pages_of_any_size_will_do(name: str, page_size: int) -> None:
    case = Case(name, (3, 1, 80), page_size, torch.bfloat16)
    result = case.run(9, case.starts, case.counts)
    torch.testing.assert_close(result, case.expected(9), atol=TOLERANCE[torch.bfloat16], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", [PLAIN, VARIANTS["both"]], ids=["plain", "both"])
@in_avx2
def test_a_token_has_the_same_bits_in_any_tile(
    variant: Variant, shape: tuple[int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    case = Case("chunks", shape, 16, dtype)
    whole = case.run(window, case.starts, case.counts, variant)
    for i in range(min(case.counts)):
        starts = [start + i for start in case.starts]
        alone = case.run(window, starts, [1] * len(starts), variant)
        assert torch.equal(alone, whole[[base + i for base in case.bases()]])


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("name", ROWS)
@in_avx2
def test_operations_read_the_tables_of_their_group(name: str, group: int) -> None:
    case = Case(name, (4, 4, 64), 16, torch.bfloat16)
    pages = case.written()
    result = case.run(6, case.starts, case.counts, group=group)
    assert torch.equal(case.pages, pages)
    torch.testing.assert_close(result, case.expected(6), atol=TOLERANCE[torch.bfloat16], rtol=0)


@pytest.mark.parametrize(
    ("columns", "message"),
    [([64], "tables of 1 KV groups for a program of 2"), ([64, 32], "must have one shape")],
)
def test_tables_that_are_not_those_of_the_groups_are_refused(
    columns: list[int], message: str
) -> None:
    case = Case("decode", (4, 4, 64), 16, torch.float32)
    write = Op(kind=Kind.KV_WRITE, width=2 * 4 * 64, offset=4 * 64, group=1)
    program = Program(case.model, [write], [case.qkv.shape[1]], [])
    tables = [case.tables[:, :count] for count in columns]
    inputs = ProgramInputs(case.starts, case.counts, case.numbers, tables, [], None)
    pages = case.pages.clone()
    with pytest.raises(ValueError, match=message):
        program.run(case.qkv.clone(), inputs, case.pages.unsqueeze(0))
    assert torch.equal(case.pages, pages)
