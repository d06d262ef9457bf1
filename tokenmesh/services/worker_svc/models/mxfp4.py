"""MXFP4 of the OCP Microscaling Formats specification (version 1.0), as gpt_oss publishes experts.

A block is 32 numbers of e2m1 (a sign, 2 bits of exponent, 1 of mantissa) that share one scale of
e8m0, a power of two. Two numbers lie in a byte, the first in its lower 4 bits.
"""

from typing import Final

import torch

BLOCK_BYTES: Final = 16
"""Of 32 numbers."""
NAN_SCALE: Final = 255
"""The only scale that is not a power of two."""
_BIAS: Final = 127
_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES: Final = (*_MAGNITUDES, *(-each for each in _MAGNITUDES))
"""By the 4 bits; the first of them is the sign."""


def dequantize(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """blocks uint8 [..., G, 16], scales uint8 [..., G] -> `dtype` [..., G * 32].

    Exact where the products are numbers of `dtype`. A scale of 255 makes its block NaN.
    """
    pairs = torch.tensor([(_VALUES[byte & 15], _VALUES[byte >> 4]) for byte in range(256)])
    # float64 holds all powers of two from -127 to 127
    powers = torch.exp2(torch.arange(256, dtype=torch.float64) - _BIAS)
    powers[NAN_SCALE] = torch.nan
    numbers = pairs[blocks.int()].flatten(-2)
    if dtype == torch.float64:
        numbers = numbers.double()
    products = numbers * powers.to(numbers.dtype)[scales.int()][..., None]
    return products.to(dtype).flatten(-2)
