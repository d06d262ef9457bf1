"""Round a plain weight to codes, when it is loaded or written: to the nearest, without data."""

from typing import Final, Literal

import torch

from tokenmesh.kernels.codes import Codes

Rounding = Literal["int8", "int4", "fp8"]
"""int8 and fp8 have a scale for each output, int4 for each 32 inputs of it."""
INT4_GROUP: Final = 32
_E4M3_LARGEST: Final = 448.0
_SMALLEST: Final = 1e-30
"""For outputs whose weights are all zero."""


def rounded(weight: torch.Tensor, to: Rounding) -> Codes:
    """Codes of weight [O, I], which may be of any float type.

    Where groups of int4 do not divide the inputs, they are int8.
    """
    if to == "fp8":
        return _fp8(weight)
    if to == "int4" and weight.shape[1] % INT4_GROUP == 0:
        return _int4(weight)
    return _int8(weight)


def _int8(weight: torch.Tensor) -> Codes:
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True).clamp_min(_SMALLEST) / 127
    numbers = (wide / scales).round_().add_(128).to(torch.uint8)
    return Codes(numbers, 8, scales, weight.shape[1], center=128)


def _int4(weight: torch.Tensor) -> Codes:
    wide = weight.float().view(len(weight), -1, INT4_GROUP)
    # the number farthest from 0 becomes -8, which leaves all 16 numbers in use
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    farthest = torch.where(-low >= high, low, high)
    scales = farthest / -8
    scales = torch.where(scales.abs() < _SMALLEST, torch.full_like(scales, _SMALLEST), scales)
    numbers = (wide / scales).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
    return Codes(numbers.flatten(1), 4, scales[..., 0], INT4_GROUP, center=8)


def _fp8(weight: torch.Tensor) -> Codes:
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True).clamp_min(_SMALLEST) / _E4M3_LARGEST
    numbers = (wide / scales).to(torch.float8_e4m3fn).view(torch.uint8)
    return Codes(numbers, 8, scales, weight.shape[1], kind="e4m3")
