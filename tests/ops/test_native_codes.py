"""The C kernels of quantized weights: right on odd shapes, the same bits for any batch."""

import random
from dataclasses import replace

import pytest
import torch

from tests.ops.native import in_avx2, needs_native
from tokenmesh.kernels.codes import Codes, merged
from tokenmesh.kernels.linear.formats import round
from tokenmesh.kernels.linear.formats.round import rounded
from tokenmesh.kernels.native import NativeCodes
from tokenmesh.kernels.native.start import library

pytestmark = [needs_native, in_avx2]

KINDS = ["int8", "int6", "int5", "int4", "table", "e4m3"]
TABLE = tuple(range(3, 19))
ROUNDED = 2e-2
"""Largest relative error where activations are int8 with a scale for at most 64 of them."""


def random_codes(random_: random.Random, kind: str) -> Codes:
    """Codes of an odd number of outputs; some with offsets, some in another order."""
    group = random_.choice([0, 16, 32, 64, 128])
    outputs = random_.randint(1, 70)
    inputs = group * random_.randint(2, 5) if group else random_.randint(1, 300)
    bits = {"int8": 8, "e4m3": 8, "int5": 5, "int6": 6}.get(kind, 4)
    numbers = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8)
    if kind == "e4m3":
        numbers = torch.randn(outputs, inputs).mul(40).to(torch.float8_e4m3fn).view(torch.uint8)
    groups = inputs // group if group else 1
    scales = torch.rand(outputs, groups) * 0.1 + 1e-3
    return Codes(
        numbers,
        bits,
        scales,
        group or inputs,
        offsets=torch.randn(outputs, groups) * 0.2 if random_.random() < 0.5 else None,
        kind={"table": "table", "e4m3": "e4m3"}.get(kind, "integers"),  # type: ignore[arg-type]
        center=0 if kind == "e4m3" else 1 << (bits - 1),
        table=TABLE if kind == "table" else None,
        order=torch.randperm(inputs) if random_.random() < 0.5 else None,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "rounded"])
def test_products_are_those_of_the_decoded_weight(kind: str, is_exact: bool) -> None:
    random_ = random.Random(kind)
    torch.manual_seed(0)
    for _ in range(12):
        codes = random_codes(random_, kind)
        if not NativeCodes.fits(codes, is_exact):
            pytest.skip("this processor has no AVX-512 VBMI")
        weight, bias = codes.decoded().double(), torch.randn(codes.shape[0])
        packed = NativeCodes.pack(codes, bias, is_exact)
        limit = 3e-6 if is_exact else ROUNDED
        for tokens in (1, random_.randint(2, 64)):
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.randn(tokens, codes.shape[1]).to(dtype)
                expected = x.double() @ weight.t() + bias.double()
                error = (packed.product(x, torch.float32) - expected).norm() / expected.norm()
                assert error < limit
                assert packed.product(x).dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "rounded"])
def test_a_token_has_the_same_bits_in_any_batch(kind: str, is_exact: bool) -> None:
    torch.manual_seed(0)
    codes = random_codes(random.Random(kind), kind)
    if not NativeCodes.fits(codes, is_exact):
        pytest.skip("this processor has no AVX-512 VBMI")
    packed = NativeCodes.pack(codes, None, is_exact)
    x = torch.randn(300, codes.shape[1]).bfloat16()
    whole = packed.product(x)
    for first, tokens in ((0, 1), (5, 3), (17, 8), (250, 50), (40, 9)):
        assert torch.equal(packed.product(x[first : first + tokens]), whole[first : first + tokens])


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_change_no_bits(kind: str) -> None:
    """Products by tiles of AMX, where the processor has it, are those without."""
    torch.manual_seed(0)
    random_ = random.Random(kind)
    for _ in range(12):
        codes = random_codes(random_, kind)
        if random_.random() < 0.3:
            codes = replace(codes, center=0)
        if not NativeCodes.fits(codes, is_exact=False):
            pytest.skip("this processor has no AVX-512 VBMI")
        packed = NativeCodes.pack(codes, torch.randn(codes.shape[0]), is_exact=False)
        x = torch.randn(random_.choice([48, 61, 75, 300]), codes.shape[1]).bfloat16()
        has_tiles = library().tm_has_amx()
        with_tiles = packed.product(x)
        try:
            assert library().tm_use_amx(0) == 0
            without = packed.product(x)
            torch.testing.assert_close(without, with_tiles, rtol=0, atol=0, equal_nan=True)
        finally:
            assert library().tm_use_amx(has_tiles) == has_tiles


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_decoded_weight(kind: str) -> None:
    torch.manual_seed(0)
    codes = random_codes(random.Random(kind), kind)
    index = torch.randperm(codes.shape[0])
    for is_exact in (True, False):
        if not NativeCodes.fits(codes, is_exact):
            continue
        packed = NativeCodes.pack(codes, None, is_exact)
        found = packed.rows(index, torch.float32)
        limit = 1e-5 if is_exact else 1e-3
        torch.testing.assert_close(found, codes.decoded()[index], rtol=limit, atol=limit)
        assert torch.equal(packed.rows(index, torch.bfloat16), found.bfloat16())
    with pytest.raises(IndexError, match=f"to {codes.shape[0] - 1}"):
        packed.rows(torch.tensor([codes.shape[0]]), torch.float32)


def test_scales_of_eleven_bits_are_kept_where_activations_are_rounded() -> None:
    torch.manual_seed(0)
    scales = (torch.rand(40, 3) * 1e-3).half().float()
    codes = Codes(torch.randint(0, 16, (40, 96), dtype=torch.uint8), 4, scales, 32, center=8)
    found = NativeCodes.pack(codes, None, is_exact=False).rows(torch.arange(40), torch.float32)
    assert torch.equal(found, codes.decoded())


def test_numbers_that_are_not_finite_are_seen() -> None:
    packed = NativeCodes.pack(rounded(torch.randn(8, 64), "int8"), None, is_exact=False)
    for number in (torch.nan, torch.inf, -torch.inf):
        x = torch.randn(2, 64)
        x[1, 7] = number
        out = packed.product(x)
        assert out[0].isfinite().all()
        assert out[1].isnan().all()
    zeros = packed.product(torch.full((1, 64), 1e-40))
    assert torch.equal(zeros, torch.zeros(1, 8))


@pytest.mark.parametrize("to", ["int8", "int6", "int4", "fp8"])
def test_rounding_keeps_what_is_on_the_grid(to: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(9, 64)
    weight[3] = 0
    once = rounded(weight, to).decoded()  # type: ignore[arg-type]
    torch.testing.assert_close(rounded(once, to).decoded(), once)  # type: ignore[arg-type]
    limit = {"int8": 1e-2, "int6": 3e-2, "int4": 0.11, "fp8": 4e-2}[to]
    assert (once - weight).norm() / weight.norm() < limit


@pytest.mark.parametrize("to", ["int8", "int4", "fp8"])
def test_rounding_in_pieces_changes_nothing(to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = torch.randn(11, 64)
    whole = rounded(weight, to)  # type: ignore[arg-type]
    monkeypatch.setattr(round, "_AT_ONCE", 3 * 64)
    pieces = rounded(weight, to)  # type: ignore[arg-type]
    assert torch.equal(whole.numbers, pieces.numbers)
    assert torch.equal(whole.scales, pieces.scales)


def test_weights_of_one_kind_are_merged() -> None:
    torch.manual_seed(0)
    parts = [rounded(torch.randn(size, 64), "int4") for size in (5, 9)]
    whole = merged(parts)
    assert whole is not None
    assert torch.equal(whole.decoded(), torch.cat([each.decoded() for each in parts]))
    assert merged([parts[0], rounded(torch.randn(3, 64), "fp8")]) is None
    in_order = replace(parts[1], order=torch.arange(64).flip(0))
    assert merged([parts[0], in_order]) is None


@pytest.mark.parametrize("order", [None, torch.arange(128).flip(0)], ids=["ordered", "any order"])
def test_weights_of_other_bits_and_groups_are_merged_without_a_change(
    order: torch.Tensor | None,
) -> None:
    torch.manual_seed(0)

    def codes(bits: int, group: int, center: int, has_offsets: bool) -> Codes:
        numbers = torch.randint(0, 1 << bits, (7, 128), dtype=torch.uint8)
        scales = torch.rand(7, 128 // group)
        offsets = torch.randn(scales.shape) if has_offsets else None
        return Codes(numbers, bits, scales, group, offsets, center=center, order=order)

    q5_0, q8_0 = codes(5, 32, 16, False), codes(8, 32, 128, False)
    q4_k, q6_k = codes(4, 32, 0, True), codes(6, 16, 32, False)
    for parts, bits, group in (
        ([q5_0, q8_0], 8, 32),
        ([q4_k, q6_k], 6, 16),
        ([q5_0, q6_k], 6, 16),
        ([q8_0, q4_k, q5_0], 8, 32),
        ([codes(4, 128, 8, False), codes(4, 32, 8, True)], 4, 32),
    ):
        whole = merged(parts)
        assert whole is not None
        assert (whole.bits, whole.group_size) == (bits, group)
        assert torch.equal(whole.decoded(), torch.cat([each.decoded() for each in parts]))
    assert merged([codes(8, 32, 128, False), codes(8, 32, 0, False)]) is None
