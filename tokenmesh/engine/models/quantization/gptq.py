"""GPTQ: round a weight column by column; later columns compensate for the error of earlier ones.

After Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (2022). The error of the products with the inputs x of a calibration is minimized:
trace(E H E^T), where E [O, I] is the change of the weight and H the sum of x x^T.
"""

from dataclasses import dataclass
from typing import Final

import torch

from tokenmesh.kernels.linear.formats.packing import by_group

_DAMPING: Final = 0.01
"""Added to the diagonal of H, relative to its mean, so that H can be inverted."""
_BLOCK: Final = 128
"""Columns whose errors reach the columns behind them as one product."""
_SMALLEST: Final = 1e-30
"""For groups whose weights are all zero."""


@dataclass(frozen=True, slots=True)
class GptqSpec:
    """The integers that a weight becomes."""

    bits: int
    group_size: int | None
    """Inputs that share a scale; None: all of an output."""
    is_symmetric: bool = True
    """Without zero points."""
    act_order: bool = True
    """Columns with the largest inputs are rounded first; groups are of neighbors all the same."""


@dataclass(slots=True)
class Hessian:
    """The sum of x x^T over the inputs x of a linear layer."""

    total: torch.Tensor
    """float32 [I, I]"""

    @classmethod
    def of(cls, inputs: int) -> "Hessian":
        return cls(torch.zeros(inputs, inputs))

    def add(self, x: torch.Tensor) -> None:
        """Add the inputs x [T, I]."""
        wide = x.float()
        self.total.addmm_(wide.T, wide)


@dataclass(frozen=True, slots=True)
class Plan:
    """In which order columns are rounded, and how each one's error is compensated."""

    hessian: torch.Tensor
    """float32 [I, I]"""
    order: torch.Tensor
    """int64 [I]: the columns in the order in which they are rounded."""
    factor: torch.Tensor
    """float32 [I, I]: the upper Cholesky factor of the damped inverse of H, in that order."""

    @classmethod
    def of(cls, hessian: torch.Tensor, act_order: bool) -> "Plan":
        """act_order: as in GptqSpec. Raises ValueError for a hessian that is not finite."""
        if not hessian.isfinite().all():
            raise ValueError("the inputs of the calibration are infinite or NaN")
        diagonal = hessian.diagonal()
        order = torch.arange(len(hessian))
        if act_order:
            order = diagonal.argsort(descending=True, stable=True)
        work = hessian[order][:, order].double()
        damped = work.diagonal()
        # a column that no input reaches is rounded to the nearest
        damped.masked_fill_(damped == 0, 1.0)
        damped += _DAMPING * damped.mean()
        # one at a time, as each of them is as large as `work`
        work = torch.linalg.cholesky(work)
        work = torch.cholesky_inverse(work)
        work = torch.linalg.cholesky(work, upper=True)
        return cls(hessian, order, work.float())


@dataclass(frozen=True, slots=True)
class GptqWeight:
    """A weight of integers. G groups."""

    numbers: torch.Tensor
    """uint8 [O, I], below 2 ** bits."""
    zeros: torch.Tensor
    """float32 [O, G]: the number that stands for 0."""
    scales: torch.Tensor
    """float32 [O, G]"""

    def decoded(self) -> torch.Tensor:
        """The weight that the integers stand for, float32 [O, I]."""
        return by_group(self.numbers, self.zeros, self.scales, None)


def relative_error(weight: torch.Tensor, rounded: torch.Tensor, hessian: torch.Tensor) -> float:
    """The squared error of the products with the calibration's inputs, relative to the products.

    weight and rounded are float32 [O, I], hessian is [I, I].
    """
    change = rounded - weight
    whole = float(((weight @ hessian) * weight).sum())
    return float(((change @ hessian) * change).sum()) / whole if whole else 0.0


def rounded_by_gptq(weight: torch.Tensor, plan: Plan, spec: GptqSpec) -> GptqWeight:
    """Round weight [O, I], whose inputs the groups divide."""
    outputs, inputs = weight.shape
    size = spec.group_size or inputs
    order = plan.order
    group_of = (order // size).tolist()
    scales = torch.empty(outputs, inputs // size)
    zeros = torch.empty_like(scales)
    if spec.act_order:
        for group, part in enumerate(torch.split(weight.float(), size, dim=1)):
            scales[:, group], zeros[:, group] = _grid(part, spec)
    work = weight.float()[:, order]
    numbers = torch.empty(outputs, inputs, dtype=torch.uint8)
    largest = (1 << spec.bits) - 1
    factor = plan.factor
    for first in range(0, inputs, _BLOCK):
        end = min(first + _BLOCK, inputs)
        errors = torch.zeros(outputs, end - first)
        for column in range(first, end):
            group = group_of[column]
            if not spec.act_order and column % size == 0:
                part = work[:, column : column + size]
                if column + size > end:
                    # columns behind this block are without its errors so far
                    part = part.clone()
                    part[:, end - column :] -= errors @ factor[first:end, end : column + size]
                scales[:, group], zeros[:, group] = _grid(part, spec)
            scale, zero = scales[:, group], zeros[:, group]
            number = (work[:, column] / scale).round_().add_(zero).clamp_(0, largest)
            numbers[:, order[column]] = number.to(torch.uint8)
            error = (work[:, column] - (number - zero) * scale) / factor[column, column]
            errors[:, column - first] = error
            work[:, column:end].addr_(error, factor[column, column:end], alpha=-1)
        work[:, end:].addmm_(errors, factor[first:end, end:], alpha=-1)
    return GptqWeight(numbers, zeros, scales)


def _grid(part: torch.Tensor, spec: GptqSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and zero points [O] of the weights [O, n] of a group."""
    low, high = part.amin(1), part.amax(1)
    if spec.is_symmetric:
        # the number farthest from 0 becomes the lowest one, which leaves all numbers in use
        center = 1 << (spec.bits - 1)
        scales = torch.where(-low >= high, low, high) / -center
        zeros = torch.full_like(scales, center)
        return torch.where(scales.abs() < _SMALLEST, _SMALLEST, scales), zeros
    largest = (1 << spec.bits) - 1
    low, high = low.clamp_max(0), high.clamp_min(0)
    scales = ((high - low) / largest).clamp_min(_SMALLEST)
    return scales, (-low / scales).round_()
