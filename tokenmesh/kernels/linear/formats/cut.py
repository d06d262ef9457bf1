"""Find the bytes of a weight's tensors that stand for some of its outputs and inputs.

Tensors of a format hold words, groups and blocks: what is read begins and ends at their borders, so
that it is a smaller weight of the same format.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

OUTPUTS: Final = 0
INPUTS: Final = 1


class Axis(NamedTuple):
    """A dimension of a stored tensor."""

    of: int
    """`OUTPUTS` or `INPUTS`."""
    per: int = 1
    """So many of them are `stored` numbers in a row."""
    stored: int = 1
    counts: int | None = None
    """The numbers say which group of so many inputs each input is of; None: they do not."""


SHAPE: Final = "shape"
"""A tensor that holds the weight's shape."""
Axes = Mapping[str, tuple[Axis | None, ...] | str]
"""The dimensions of each tensor, by its name in the format; None: one that is not divided."""


@dataclass(frozen=True, slots=True)
class CutWeight:
    """The smallest part of a weight that holds what is asked for and can be read by itself."""

    axes: Axes
    rows: slice
    columns: slice

    @classmethod
    def of(cls, axes: Axes, shape: tuple[int, int], rows: slice, columns: slice) -> "CutWeight":
        found = [each for dims in axes.values() if dims != SHAPE for each in dims]
        ranges = []
        for axis, asked in ((OUTPUTS, rows), (INPUTS, columns)):
            units = [each.per for each in found if isinstance(each, Axis) and each.of == axis]
            unit = math.lcm(*units) if units else shape[axis]
            stop = min(shape[axis], -(-asked.stop // unit) * unit)
            ranges.append(slice(asked.start // unit * unit, stop))
        return cls(axes, *ranges)

    def slices(self, name: str, sizes: tuple[int, ...]) -> tuple[slice, ...]:
        """Return what is read of a tensor of these sizes."""
        dims = self.axes.get(name, SHAPE)
        if isinstance(dims, str):
            return tuple(slice(0, size) for size in sizes)
        found = []
        for axis, size in zip(dims, sizes, strict=True):
            if axis is None:
                found.append(slice(0, size))
                continue
            own = (self.rows, self.columns)[axis.of]
            stop = -(-own.stop // axis.per) * axis.stored
            found.append(slice(own.start // axis.per * axis.stored, min(size, stop)))
        return tuple(found)

    def fitted(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what was read as the tensor of a weight of this size."""
        dims = self.axes.get(name, ())
        if dims == SHAPE:
            sizes = [each.stop - each.start for each in (self.rows, self.columns)]
            return torch.tensor(sizes, dtype=tensor.dtype)
        for axis in dims:
            if isinstance(axis, Axis) and axis.counts is not None and bool((tensor >= 0).all()):
                moved: torch.Tensor = tensor - self.columns.start // axis.counts
                return moved
        return tensor
