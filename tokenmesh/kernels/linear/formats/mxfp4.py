"""MXFP4 of the OCP Microscaling Formats specification (version 1.0), as gpt_oss publishes experts.

A block is 32 numbers of e2m1 (a sign, 2 bits of exponent, 1 of mantissa) that share one scale of
e8m0, a power of two. Two numbers lie in a byte, the first in its lower 4 bits.
"""

from dataclasses import dataclass, field
from typing import Final

import torch

from tokenmesh.kernels.codes import Codes
from tokenmesh.kernels.linear.formats.parts import FormatError, Parts, Tensors, expect, part_of

BLOCK_BYTES: Final = 16
"""Bytes of a block of 32 numbers."""
NAN_SCALE: Final = 255
"""The only scale that is not a power of two."""
_BIAS: Final = 127
_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES: Final = (*_MAGNITUDES, *(-each for each in _MAGNITUDES))
"""Values by the 4 bits, the first of which is the sign."""
_BYTES: Final = (torch.uint8,)
E2M1_CENTER: Final = 12
E2M1_TABLE: Final = tuple(int(2 * each) + E2M1_CENTER for each in _VALUES)
"""Twice the values by their bits, plus the center: whole numbers from 0 on."""


def scales_of(packed: torch.Tensor) -> torch.Tensor:
    """uint8 of any shape -> float32: what whole numbers of the table are multiplied with."""
    powers = torch.exp2(packed.double() - _BIAS).float()
    return powers.masked_fill(packed == NAN_SCALE, torch.nan) / 2


def e2m1_numbers(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., B] -> float32 [..., 2B]."""
    pairs = torch.tensor([(_VALUES[byte & 15], _VALUES[byte >> 4]) for byte in range(256)])
    return pairs[packed.int()].flatten(-2)


def dequantize(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """blocks uint8 [..., G, 16], scales uint8 [..., G] -> `dtype` [..., G * 32].

    Exact where the products are numbers of `dtype`. A scale of 255 makes its block NaN.
    """
    # float64 holds all powers of two from -127 to 127
    powers = torch.exp2(torch.arange(256, dtype=torch.float64) - _BIAS)
    powers[NAN_SCALE] = torch.nan
    numbers = e2m1_numbers(blocks)
    if dtype == torch.float64:
        numbers = numbers.double()
    products = numbers * powers.to(numbers.dtype)[scales.int()][..., None]
    return products.to(dtype).flatten(-2)


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    """blocks [E, O, I / 32, 16], scales [E, O, I / 32] -> [E, I, O], as gpt_oss multiplies."""

    weight: str = field(default="blocks", init=False)
    stored: tuple[torch.dtype, ...] = field(default=_BYTES, init=False)
    others: tuple[str, ...] = field(default=("scales",), init=False)

    def shape_of(self, parts: Parts) -> tuple[int, ...]:
        shape = part_of(parts, self.weight, _BYTES, self.weight).shape
        if len(shape) != 4 or shape[-1] != BLOCK_BYTES:
            asked = f"[experts, outputs, inputs / {2 * BLOCK_BYTES}, {BLOCK_BYTES}]"
            raise FormatError(self.weight, f"has shape {list(shape)}, not {asked}")
        expect(parts, "scales", _BYTES, self.weight, shape[:-1])
        return shape[0], 2 * BLOCK_BYTES * shape[2], shape[1]

    def reference(self, tensors: Tensors) -> torch.Tensor:
        """float32 [E, I, O]."""
        return dequantize(tensors["blocks"], tensors["scales"], torch.float32).transpose(-1, -2)

    def axes(self, _: Parts) -> None:
        """Return nothing: experts are read one by one."""

    def codes(self, tensors: Tensors) -> Codes | None:
        """Return one expert's codes, [1, ...]: outputs by inputs, whatever the weight's order."""
        blocks, scales = tensors["blocks"][0], tensors["scales"][0]
        return Codes(
            torch.stack((blocks & 15, blocks >> 4), -1).flatten(1),
            bits=4,
            scales=scales_of(scales),
            group_size=2 * BLOCK_BYTES,
            kind="table",
            center=E2M1_CENTER,
            table=E2M1_TABLE,
        )
