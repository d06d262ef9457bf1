"""Round a plain weight to codes, when it is loaded or written: to the nearest, without data."""

from dataclasses import replace
from typing import Final, Literal

import torch

from tokenmesh.kernels.codes import Codes

Rounding = Literal["int8", "int4", "fp8"]
"""int8 and fp8 have a scale for each output, int4 for each 32 inputs of it. int8 and fp8 let
activations be rounded to 8 bits as well."""
Grid = Literal["int8", "int6", "int4", "fp8"]
"""As `Rounding`; int6 has a scale for each 64 inputs."""
INT4_GROUP: Final = 32
_INT6_GROUP: Final = 64
_E4M3_LARGEST: Final = 448.0
_SMALLEST: Final = 1e-30
"""For outputs whose weights are all zero."""


_AT_ONCE: Final = 1 << 22
"""Numbers that are rounded at a time, which bounds the memory for them as float32."""


def head_grid(to: Rounding, device: torch.device) -> Grid:
    """For a head: 4 bits cost more than they save, and a GPU computes fastest with 8 bits."""
    if to != "int4":
        return to
    return "int6" if device.type == "cpu" else "int8"


def rounded(weight: torch.Tensor, to: Grid) -> Codes:
    """Codes of weight [O, I], which may be of any float type.

    Where groups of int4 or int6 do not divide the inputs, they are int8.
    """
    rows = max(1, _AT_ONCE // weight.shape[1])
    codes = _rounded(weight[:rows], to)
    if len(weight) <= rows:
        return codes
    numbers = codes.numbers.new_empty(weight.shape)
    scales = codes.scales.new_empty(len(weight), codes.scales.shape[1])
    for first in range(0, len(weight), rows):
        some = slice(first, first + rows)
        codes = _rounded(weight[some], to)
        numbers[some], scales[some] = codes.numbers, codes.scales
    return replace(codes, numbers=numbers, scales=scales)


def _rounded(weight: torch.Tensor, to: Grid) -> Codes:
    if to == "fp8":
        return _fp8(weight)
    if to == "int4" and weight.shape[1] % INT4_GROUP == 0:
        return _by_group(weight, 4, INT4_GROUP)
    if to == "int6" and weight.shape[1] % _INT6_GROUP == 0:
        return _by_group(weight, 6, _INT6_GROUP)
    return _int8(weight)


def _int8(weight: torch.Tensor) -> Codes:
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True).clamp_min(_SMALLEST) / 127
    numbers = (wide / scales).round_().add_(128).to(torch.uint8)
    return Codes(numbers, 8, scales, weight.shape[1], center=128, rounds_inputs=True)


def _by_group(weight: torch.Tensor, bits: int, size: int) -> Codes:
    center = 1 << (bits - 1)
    wide = weight.float().view(len(weight), -1, size)
    # the number farthest from 0 becomes the lowest, which leaves all numbers in use
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    farthest = torch.where(-low >= high, low, high)
    scales = farthest / -center
    scales = torch.where(scales.abs() < _SMALLEST, torch.full_like(scales, _SMALLEST), scales)
    numbers = (wide / scales).round_().clamp_(-center, center - 1).add_(center).to(torch.uint8)
    return Codes(numbers.flatten(1), bits, scales[..., 0], size, center=center)


def _fp8(weight: torch.Tensor) -> Codes:
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True).clamp_min(_SMALLEST) / _E4M3_LARGEST
    numbers = (wide / scales).to(torch.float8_e4m3fn).view(torch.uint8)
    return Codes(numbers, 8, scales, weight.shape[1], kind="e4m3", rounds_inputs=True)
