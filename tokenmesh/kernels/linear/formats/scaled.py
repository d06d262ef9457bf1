"""Numbers of 8 bits times scales: fp8, int8 and MXFP8.

They differ by what one scale stands for: all numbers (tensor), a row (channel), a block of rows and
columns, or a group of columns in a row.
"""

from dataclasses import dataclass, field
from typing import Final

import torch

from tokenmesh.kernels.codes import Codes, e4m3_numbers
from tokenmesh.kernels.linear.formats.cut import INPUTS, OUTPUTS, Axes, Axis
from tokenmesh.kernels.linear.formats.packing import spread
from tokenmesh.kernels.linear.formats.parts import (
    FLOATS,
    FormatError,
    Parts,
    Tensors,
    expect,
    groups_of,
    matrix,
)

E8M0: Final = (torch.uint8, torch.float8_e8m0fnu)
"""Powers of two of the OCP Microscaling Formats specification; 255 is NaN."""
WHOLE: Final = 0
"""Size of a tile that spans all rows or columns."""
_INT8_CENTER: Final = 128


@dataclass(frozen=True, slots=True)
class Scaled:
    """weight [O, I] of 8 bits times a scale for each tile."""

    stored: tuple[torch.dtype, ...] = (torch.float8_e4m3fn,)
    tile: tuple[int, int] = (WHOLE, WHOLE)
    """Rows and columns that share a scale."""
    scales: tuple[str, ...] = ("weight_scale",)
    """Names of the scale; the first that is stored counts."""
    scale_types: tuple[torch.dtype, ...] = FLOATS
    zero_point: str | None = None
    """Name of what is subtracted before, in the shape of the scale and the type of the weight."""
    is_symmetric: bool = True
    """It may be left out."""
    divisor: float = 1.0
    """The divisor of the products."""
    rounds_inputs: bool = False
    """True where activations are rounded to 8 bits as well."""
    weight: str = field(default="weight", init=False)

    @property
    def others(self) -> tuple[str, ...]:
        return self.scales if self.zero_point is None else (*self.scales, self.zero_point)

    def shape_of(self, parts: Parts) -> tuple[int, ...]:
        outputs, inputs = matrix(parts, self.weight, self.stored)
        scale = self._scale_in(parts)
        for other in self.scales:
            if other in parts and other != scale:
                raise FormatError(other, f"is stored together with {parts[scale].name}")
        shapes = self._scale_shapes(outputs, inputs)
        expect(parts, scale, self.scale_types, self.weight, *shapes)
        if self.zero_point is not None and (self.zero_point in parts or not self.is_symmetric):
            expect(parts, self.zero_point, self.stored, self.weight, parts[scale].shape)
        return outputs, inputs

    def reference(self, tensors: Tensors) -> torch.Tensor:
        stored = tensors[self.weight]
        weight = e4m3_numbers(stored) if stored.dtype == torch.float8_e4m3fn else stored.float()
        rows = tuple(
            whole if size == WHOLE else size
            for size, whole in zip(self.tile, weight.shape, strict=True)
        )
        if self.zero_point is not None and self.zero_point in tensors:
            zeros = _as_matrix(tensors[self.zero_point].float())
            weight.sub_(spread(zeros, rows, weight.shape))
        scales = _as_matrix(scale_numbers(tensors[self._scale_in(tensors)]))
        weight.mul_(spread(scales, rows, weight.shape))
        return weight if self.divisor == 1 else weight.div_(self.divisor)

    def codes(self, tensors: Tensors) -> Codes | None:
        weight = tensors[self.weight]
        outputs, inputs = weight.shape
        rows, columns = self.tile
        scales = _as_matrix(scale_numbers(tensors[self._scale_in(tensors)])) / self.divisor
        scales = _by_row(scales, rows, outputs)
        size = inputs if columns == WHOLE else columns
        if weight.dtype != torch.int8:
            numbers = weight.view(torch.uint8)
            return Codes(numbers, 8, scales, size, kind="e4m3", rounds_inputs=self.rounds_inputs)
        offsets = None
        if self.zero_point is not None and self.zero_point in tensors:
            zeros = _by_row(_as_matrix(tensors[self.zero_point].float()), rows, outputs)
            offsets = -zeros * scales
        numbers = weight.view(torch.uint8) ^ _INT8_CENTER
        return Codes(
            numbers,
            8,
            scales,
            size,
            offsets,
            center=_INT8_CENTER,
            rounds_inputs=self.rounds_inputs,
        )

    def axes(self, parts: Parts) -> Axes:
        rows, columns = self.tile
        dims = (
            None if rows == WHOLE else Axis(OUTPUTS, rows),
            None if columns == WHOLE else Axis(INPUTS, columns),
        )
        scale = self._scale_in(parts)
        size = len(parts[scale].shape)
        own = dims if size == 2 else dims[:size]
        names = [scale, *([] if self.zero_point is None else [self.zero_point])]
        return {self.weight: (Axis(OUTPUTS), Axis(INPUTS)), **dict.fromkeys(names, own)}

    def _scale_in(self, parts: Parts | Tensors) -> str:
        return next((name for name in self.scales if name in parts), self.scales[0])

    def _scale_shapes(self, outputs: int, inputs: int) -> list[tuple[int, ...]]:
        rows, columns = self.tile
        if rows == 1 and columns != WHOLE:
            return [(outputs, groups_of(inputs, columns, self.weight))]
        counts = tuple(
            1 if size == WHOLE else -(-whole // size)
            for size, whole in zip(self.tile, (outputs, inputs), strict=True)
        )
        if self.tile == (WHOLE, WHOLE):
            return [(), (1,), counts]
        return [counts, (outputs,)] if self.tile == (1, WHOLE) else [counts]


def _by_row(scales: torch.Tensor, rows: int, outputs: int) -> torch.Tensor:
    """[ceil(O / rows), G] -> [O, G]; rows: WHOLE for [1, G]."""
    if rows == WHOLE:
        return scales.expand(outputs, -1)
    return scales.repeat_interleave(rows, 0)[:outputs]


def scale_numbers(scales: torch.Tensor) -> torch.Tensor:
    """Scales of any type -> float32; bytes are exponents of two with a bias of 127, 255 NaN."""
    if scales.dtype not in E8M0:
        return scales.float()
    exponents = scales.view(torch.uint8)
    numbers = torch.exp2(exponents.double() - 127).float()
    return numbers.masked_fill(exponents == 255, torch.nan)


def _as_matrix(scales: torch.Tensor) -> torch.Tensor:
    """[] or [1] -> [1, 1]; [O] -> [O, 1]."""
    return scales.reshape(-1, 1) if scales.ndim < 2 else scales
