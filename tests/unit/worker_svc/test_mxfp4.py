"""MXFP4 against the tables and formulas of the OCP Microscaling Formats specification."""

import math

import pytest
import torch

from tokenmesh.kernels.linear.formats.mxfp4 import dequantize


def e2m1(bits: int) -> float:
    """Section 5.3.3: 1 bit of sign, 2 of exponent with a bias of 1, 1 of mantissa."""
    sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
    magnitude = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
    return -magnitude if sign else magnitude


def e8m0(bits: int) -> float:
    """Section 5.4.1: an exponent with a bias of 127; all ones are NaN."""
    return math.nan if bits == 255 else 2.0 ** (bits - 127)


def test_the_formula_has_the_values_that_the_specification_lists() -> None:
    listed = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert [e2m1(bits) for bits in range(16)] == listed + [-each for each in listed]
    assert (e8m0(0), e8m0(127), e8m0(254)) == (2.0**-127, 1.0, 2.0**127)


def test_every_byte_is_two_numbers_the_first_in_its_lower_bits() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 1, 16)
    numbers = dequantize(blocks, torch.full((16, 1), 127, dtype=torch.uint8), torch.float32)
    expected = [e2m1(half) for byte in range(256) for half in (byte & 15, byte >> 4)]
    assert numbers.shape == (16, 32)
    assert numbers.flatten().tolist() == expected
    assert numbers.signbit().flatten().tolist() == [math.copysign(1, each) < 0 for each in expected]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_scale_multiplies_the_numbers_of_its_block(dtype: torch.dtype) -> None:
    scales = torch.arange(256, dtype=torch.uint8).view(2, 128)
    # 0.5, -1 and 6 are in the same places of each block
    blocks = torch.zeros((2, 128, 16), dtype=torch.uint8)
    blocks[..., 0], blocks[..., 15] = 0xA1, 0x70
    numbers = dequantize(blocks, scales, dtype).view(2, 128, 32)
    for at, value in ((0, 0.5), (1, -1.0), (31, 6.0), (2, 0.0)):
        expected = [value * e8m0(bits) for bits in range(256)]
        torch.testing.assert_close(
            numbers[..., at].flatten(),
            torch.tensor(expected, dtype=torch.float64).to(dtype),
            atol=0,
            rtol=0,
            equal_nan=True,
        )


def test_blocks_follow_each_other_in_a_row() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 5, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 134, (3, 5, 2), generator=generator, dtype=torch.uint8)
    numbers = dequantize(blocks, scales, torch.float32)
    assert numbers.shape == (3, 5, 64)
    for expert, row, at in ((0, 0, 0), (1, 4, 33), (2, 2, 63), (2, 3, 30)):
        byte = int(blocks[expert, row, at // 32, at % 32 // 2])
        bits = byte >> 4 if at % 2 else byte & 15
        expected = e2m1(bits) * e8m0(int(scales[expert, row, at // 32]))
        assert float(numbers[expert, row, at]) == expected
