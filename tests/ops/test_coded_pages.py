"""Pages of 8 bits: what is written, and attention over them, in torch and in C."""

from dataclasses import replace

import pytest
import torch

from tests.ops.native import in_avx2, in_avx2_too_slowly, needs_native
from tests.ops.scattered import BLOCKS, scattered
from tests.ops.test_native_attention import BLOCKS as POOL
from tests.ops.test_native_attention import SCALE, SHAPES, VARIANTS, Case
from tokenmesh.kernels.kv_write import kv_write, slot_rows
from tokenmesh.kernels.mla_attention import latent_write, mla_attention, mla_attention_reference
from tokenmesh.kernels.mla_attention import prepare as prepare_latents
from tokenmesh.kernels.native import Kind, Op, Program, ProgramInputs
from tokenmesh.kernels.page_codes import decode, encode, row_elements, stored
from tokenmesh.kernels.paged_attention import (
    PLAIN,
    TOLERANCE,
    Rows,
    Variant,
    attention_and_lse_reference,
    paged_attention,
    paged_attention_reference,
    prepare,
)

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
CODED = [torch.int8, *FP8]
STARTS, LENGTHS = [2, 15, 17, 31, 0, 30], [1, 1, 1, 1, 19, 4]
SCALES = (0.75, 1.5)


def numbers(count: int, width: int) -> torch.Tensor:
    """Rows of every size that a float32 has, with ties, zeros, and what 8 bits cannot hold."""
    torch.manual_seed(0)
    rows = torch.randn(count, width)
    rows[0] = 0
    rows[1] *= torch.logspace(-12, 6, width)
    rows[2] = torch.linspace(-500, 500, width)
    rows[3] = torch.arange(width) * 2.0**-11
    rows[4] = torch.arange(width) / 16
    rows[5] *= 1e6
    rows[6] *= 1e-44
    return rows


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_8_bit_floats_are_torchs_own_saturated(dtype: torch.dtype) -> None:
    rows = numbers(8, 64)
    limit = torch.finfo(dtype).max
    expected = (rows / 0.75).clamp(-limit, limit).to(dtype)
    assert torch.equal(stored(encode(rows, dtype, 0.75)), stored(expected))
    broken = torch.tensor([torch.nan, torch.inf, -torch.inf])
    assert decode(encode(broken, dtype), torch.float32).nan_to_num(7).tolist() == [7, limit, -limit]


def test_int8_rows_have_a_factor_by_which_their_largest_number_is_127() -> None:
    rows = numbers(8, 48)
    coded = encode(rows, torch.int8)
    assert coded.shape == (8, row_elements(48, torch.int8))
    largest = rows.abs().amax(-1, keepdim=True)
    error = (decode(coded, torch.float32) - rows).abs()
    is_tiny = largest < 1e-40
    assert (is_tiny | (error <= largest * (0.5001 / 127))).all()
    assert coded[:, :48].long().abs().amax(-1).tolist() == [0, *[127] * 5, 0, 127]
    for broken in (torch.nan, torch.inf):
        rows[4, 3] = broken
        assert decode(encode(rows, torch.int8), torch.float32)[4].isnan().any()


class CodedCase(Case):
    """Pages with codes; every free slot holds NaN, or the largest codes and NaN as factors."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        coded: torch.dtype,
        scales: tuple[float, float],
    ) -> None:
        super().__init__(name, shape, 16, dtype)
        _, kv_heads, dim = shape
        self.scales = scales
        known = torch.randn(2, POOL, kv_heads, 16, dim)
        planes = [encode(plane, coded, each) for plane, each in zip(known, scales, strict=True)]
        free = stored(torch.full((2, POOL, kv_heads, 16, row_elements(dim, coded)), 0).to(coded))
        self.pages = free.fill_(0x7F).view(coded)
        for start, number in zip(self.starts, self.numbers, strict=True):
            for at in range(start):
                place = (self.tables[number, at // 16], slice(None), at % 16)
                for page, plane in zip(self.pages, planes, strict=True):
                    stored(page)[place] = stored(plane)[place]

    def written(self) -> torch.Tensor:
        heads, kv_heads, dim = self.model.heads, self.model.kv_heads, self.model.head_dim
        pages = self.pages.clone()
        keys_values = self.qkv[:, heads * dim :].view(-1, 2 * kv_heads, dim)
        rows = zip(self.starts, self.counts, self.numbers, strict=True)
        at = [(n, p) for start, count, n in rows for p in range(start, start + count)]
        blocks = torch.stack([self.tables[number, position // 16] for number, position in at])
        offsets = torch.tensor([position % 16 for _, position in at])
        kv_write(keys_values, pages, slot_rows(blocks, offsets, pages.shape), *self.scales)
        return pages

    def run(
        self,
        window: int | None,
        starts: list[int],
        counts: list[int],
        variant: Variant = PLAIN,
        group: int = 0,
    ) -> torch.Tensor:
        """The scales are those of layer 1."""
        heads, kv_heads, dim = self.model.heads, self.model.kv_heads, self.model.head_dim
        queries, skipped = (
            heads * dim,
            [s - own for s, own in zip(starts, self.starts, strict=True)],
        )
        firsts = [base + skip for base, skip in zip(self.bases(), skipped, strict=True)]
        tokens = [first + i for first, n in zip(firsts, counts, strict=True) for i in range(n)]
        hidden = self.qkv[tokens].clone()
        write = Op(kind=Kind.KV_WRITE, width=2 * kv_heads * dim, offset=queries, layer=1)
        attend = Op(
            kind=Kind.ATTENTION,
            layer=1,
            window=window or 0,
            value=SCALE,
            softcap=variant.softcap or 0,
            weight=None if variant.sinks is None else variant.sinks.data_ptr(),
        )
        program = Program(self.model, [write, attend], [hidden.shape[1]], [])
        table = torch.tensor([(torch.nan, torch.nan), self.scales])
        inputs = ProgramInputs(
            *(starts, counts, self.numbers, [self.tables], [], None), page_scales=table
        )
        program.run(hidden, inputs, self.pages.unsqueeze(0))
        return hidden[:, :queries]

    def expected(self, window: int | None, variant: Variant = PLAIN) -> torch.Tensor:
        k_scale, v_scale = self.scales
        return super().expected(window, replace(variant, k_scale=k_scale, v_scale=v_scale))


def scales_of(coded: torch.dtype) -> tuple[float, float]:
    return (1.0, 1.0) if coded == torch.int8 else SCALES


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("coded", CODED, ids=str)
@in_avx2
def test_c_kernels_write_the_same_bytes(coded: torch.dtype, dtype: torch.dtype) -> None:
    case = CodedCase("chunks", (2, 1, 64), dtype, coded, scales_of(coded))
    case.qkv.view(-1, 4, 64)[:8, 2:] = numbers(16, 64).view(8, 2, 64).to(dtype)
    case.qkv[9, 2 * 64 + 5] = torch.nan
    case.qkv[10, 3 * 64 + 6] = -torch.inf
    expected = stored(case.written())
    case.run(None, case.starts, case.counts)
    different = expected != stored(case.pages)
    if coded == torch.int8:
        # what a factor of NaN or infinity multiplies does not count
        factors = case.pages[..., -4:].contiguous().view(torch.float32)
        different[..., :-4] &= factors.isfinite()
    assert not different.any()


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kind", ["plain", "both"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("coded", CODED, ids=str)
@in_avx2_too_slowly
def test_attention_in_c_equals_the_reference(
    coded: torch.dtype,
    shape: tuple[int, int, int],
    kind: str,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    case = CodedCase("mixed", shape, dtype, coded, scales_of(coded))
    variant = VARIANTS.get(kind, PLAIN)
    result = case.run(window, case.starts, case.counts, variant)
    expected = case.expected(window, variant)
    assert expected.isfinite().all()
    torch.testing.assert_close(result, expected, atol=TOLERANCE[dtype], rtol=0)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("coded", CODED, ids=str)
@in_avx2
def test_a_token_has_the_same_bits_in_any_tile(coded: torch.dtype, dtype: torch.dtype) -> None:
    case = CodedCase("chunks", (14, 2, 48), dtype, coded, scales_of(coded))
    whole = case.run(9, case.starts, case.counts, VARIANTS["both"])
    for i in range(min(case.counts)):
        starts = [start + i for start in case.starts]
        alone = case.run(9, starts, [1] * len(starts), VARIANTS["both"])
        assert torch.equal(alone, whole[[base + i for base in case.bases()]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kind", ["plain", "everything"])
@pytest.mark.parametrize("coded", CODED, ids=str)
def test_attention_in_torch_equals_the_reference(
    coded: torch.dtype, kind: str, window: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    rows = scattered(STARTS, LENGTHS, 8)
    pages = coded_pages((2, BLOCKS, 2, 8), 14, rows, coded)
    query = torch.randn(sum(LENGTHS), 4, 14).to(dtype)
    sinks, scales = torch.tensor([1.0, -2.0, 0.5, 4.0]), scales_of(coded)
    variant = Variant(None, None, *scales)
    if kind == "everything":
        variant = Variant(3.0, sinks, *scales, value_dim=9)
    expected, expected_lse = attention_and_lse_reference(query, pages, rows, 0.3, window, variant)
    prepared = prepare(rows, pages.shape, pages.dtype, window)
    lse = torch.full((len(query), 4), torch.nan)
    for result in (
        paged_attention(query, pages, prepared, 0.3, variant, lse),
        paged_attention(query, pages, prepared, 0.3, variant),
    ):
        torch.testing.assert_close(result, expected, atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=TOLERANCE[dtype], rtol=0)
    if coded == torch.int8:
        wide = paged_attention_reference(
            *(query, decode(pages, torch.float32), rows, 0.3, window, variant)
        )
        assert torch.equal(wide, expected)


def coded_pages(shape: tuple[int, ...], width: int, rows: Rows, coded: torch.dtype) -> torch.Tensor:
    """Codes of random numbers where rows have tokens, 0x7f elsewhere."""
    page_size = shape[-1]
    seen = torch.zeros(BLOCKS, page_size, dtype=torch.bool)
    for start, length, table in zip(rows.starts, rows.lengths, rows.tables, strict=True):
        for position in range(start + length):
            seen[table[position // page_size], position % page_size] = True
    codes = stored(encode(torch.randn(*shape, width), coded))
    place = seen.view(BLOCKS, *[1] * (len(shape) - shape.index(BLOCKS) - 2), page_size, 1)
    return torch.where(place, codes, 0x7F).view(coded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("coded", CODED, ids=str)
def test_latents_in_8_bits(coded: torch.dtype, is_sparse: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rank, width, scale = 16, 24, 1.0 if coded == torch.int8 else 0.75
    rows = scattered(STARTS, LENGTHS, 8)
    pages = coded_pages((BLOCKS, 8), width, rows, coded)
    latents = torch.randn(2, width).to(dtype)
    slots = rows.tables[4, torch.tensor([0, 1])] * 8 + 3
    latent_write(latents, pages, slots, scale)
    found = pages.view(-1, pages.shape[2])[slots] if coded == torch.int8 else None
    assert found is None or torch.equal(found, encode(latents, coded))
    indices = None
    if is_sparse:
        positions = [p for s, n in zip(STARTS, LENGTHS, strict=True) for p in range(s, s + n)]
        steps = torch.arange(6)
        places = torch.tensor(positions).unsqueeze(1) - 3 * steps
        indices = places.where(places >= 0, -1)
    query = torch.randn(sum(LENGTHS), 3, width).to(dtype)
    expected, expected_lse = mla_attention_reference(query, pages, rows, rank, 0.3, indices, scale)
    prepared = prepare_latents(rows, pages.shape, pages.dtype)
    lse = torch.full((len(query), 3), torch.nan)
    result = mla_attention(query, pages, prepared, rank, 0.3, indices, lse, scale)
    torch.testing.assert_close(result, expected, atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=TOLERANCE[dtype], rtol=0)
