"""NVFP4 and MXFP4 of linear layers: numbers of e2m1, two in a byte, with a scale by group.

weight_packed or weight [O, I / 2], weight_scale [O, I / group]. NVFP4 has groups of 16, scales of
e4m3 and one more scale for all of them, MXFP4 groups of 32 and powers of two.
"""

from dataclasses import dataclass
from typing import Final, Literal

import torch

from tokenmesh.kernels.codes import Codes
from tokenmesh.kernels.linear.formats.cut import INPUTS, OUTPUTS, Axes, Axis
from tokenmesh.kernels.linear.formats.mxfp4 import E2M1_CENTER, E2M1_TABLE, e2m1_numbers
from tokenmesh.kernels.linear.formats.parts import (
    Parts,
    Tensors,
    expect,
    groups_of,
    matrix,
)
from tokenmesh.kernels.linear.formats.scaled import E8M0, scale_numbers

NVFP4_GROUP: Final = 16
MXFP4_GROUP: Final = 32
_BYTES: Final = (torch.uint8,)


@dataclass(frozen=True, slots=True)
class Fp4:
    """weight [O, I / 2] of bytes."""

    weight: str
    group_size: int
    whole: str | None
    """Name of the scale of all groups, float32 [1] or []; None: there is none."""
    use: Literal["multiply", "divide"] = "multiply"
    """The groups' scales are multiplied with it, or divided by it."""

    @property
    def stored(self) -> tuple[torch.dtype, ...]:
        return _BYTES

    @property
    def others(self) -> tuple[str, ...]:
        return ("weight_scale",) if self.whole is None else ("weight_scale", self.whole)

    def shape_of(self, parts: Parts) -> tuple[int, ...]:
        outputs, width = matrix(parts, self.weight, _BYTES)
        groups = groups_of(2 * width, self.group_size, self.weight)
        types = E8M0 if self.whole is None else (torch.float8_e4m3fn,)
        expect(parts, "weight_scale", types, self.weight, (outputs, groups))
        if self.whole is not None:
            expect(parts, self.whole, (torch.float32,), self.weight, (), (1,))
        return outputs, 2 * width

    def axes(self, parts: Parts) -> Axes:
        row = Axis(OUTPUTS)
        found: dict[str, tuple[Axis | None, ...]] = {
            self.weight: (row, Axis(INPUTS, 2)),
            "weight_scale": (row, Axis(INPUTS, self.group_size)),
        }
        if self.whole is not None:
            found[self.whole] = (None,) * len(parts[self.whole].shape)
        return found

    def codes(self, tensors: Tensors) -> Codes | None:
        packed = tensors[self.weight]
        return Codes(
            torch.stack((packed & 15, packed >> 4), -1).flatten(1),
            bits=4,
            scales=self._scales(tensors) / 2,
            group_size=self.group_size,
            kind="table",
            center=E2M1_CENTER,
            table=E2M1_TABLE,
        )

    def _scales(self, tensors: Tensors) -> torch.Tensor:
        scales = scale_numbers(tensors["weight_scale"])
        if self.whole is None:
            return scales
        whole = tensors[self.whole].float()
        return scales * whole if self.use == "multiply" else scales / whole

    def reference(self, tensors: Tensors) -> torch.Tensor:
        numbers = e2m1_numbers(tensors[self.weight])
        scales = self._scales(tensors)
        numbers.view(*scales.shape, self.group_size).mul_(scales[..., None])
        return numbers
