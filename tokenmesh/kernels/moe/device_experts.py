"""DeviceExperts: a layer's experts as codes, in the layout that kernels on a GPU read."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import torch

from tokenmesh.kernels.codes import Codes, merged
from tokenmesh.kernels.quantized_linear.device_codes import DeviceCodes, narrowed

_MOST_SCALES: Final = 1 << 31
"""Kernels number them in 32 bits."""


class Unfit(Exception):
    """No kernel computes with the codes of these experts; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceExperts:
    """One of the two stacks of weights of a layer; made by `DeviceExperts.pack`."""

    codes: DeviceCodes
    """The outputs of all experts below each other, without bias and order."""
    order: torch.Tensor | None
    """int32 [E, I]: column j of an expert is of input order[j]; None: of input j."""
    num_experts: int

    @property
    def out_features(self) -> int:
        return self.codes.numbers.shape[0] // self.num_experts

    @property
    def in_features(self) -> int:
        return self.codes.inputs

    @classmethod
    def pack(
        cls, experts: Iterable[Sequence[Codes] | None], count: int, device: torch.device
    ) -> Self:
        """Copy the slices of `count` experts to a device, one expert at a time.

        Raises Unfit where kernels do not take one of them, or they are not all alike.
        """
        stack: DeviceCodes | None = None
        orders: list[torch.Tensor | None] = []
        for expert, slices in enumerate(experts):
            whole = None if slices is None else merged(slices)
            if whole is None:
                raise Unfit("an expert has no codes, or several that differ")
            whole = whole.to(device)
            problem = DeviceCodes.problem(whole)
            if problem is not None:
                raise Unfit(problem)
            orders.append(whole.order)
            own = DeviceCodes.pack(replace(whole, order=None), None)
            if stack is None:
                stack = _room(own, count)
            _put(stack, own, expert)
        assert stack is not None
        offsets = None if stack.offsets is None else narrowed(stack.offsets)
        stack = replace(stack, scales=narrowed(stack.scales), offsets=offsets)
        return cls(stack, _stacked(orders, stack.inputs), count)

    def decoded(self) -> torch.Tensor:
        """float32 [E, O, I]: the weights, with their inputs where x has them."""
        straight = self.codes.decoded().view(self.num_experts, self.out_features, -1)
        if self.order is None:
            return straight
        index = self.order.long()[:, None].expand_as(straight)
        return torch.empty_like(straight).scatter_(2, index, straight)


def _room(one: DeviceCodes, count: int) -> DeviceCodes:
    """Memory for that many experts."""
    if one.scales.numel() * count >= _MOST_SCALES:
        raise Unfit("they have more scales than kernels number")
    outputs, groups = one.numbers.shape[0] * count, one.scales.shape[0]
    numbers = one.numbers.new_empty((outputs, one.numbers.shape[1]))
    scales = one.scales.new_empty((groups, outputs), dtype=torch.float32)
    offsets = None if one.offsets is None else torch.empty_like(scales)
    return replace(one, numbers=numbers, scales=scales, offsets=offsets)


def _put(stack: DeviceCodes, own: DeviceCodes, expert: int) -> None:
    outputs = own.numbers.shape[0]
    rows = slice(expert * outputs, (expert + 1) * outputs)
    if _kind(own) != _kind(stack) or stack.scales[:, rows].shape != own.scales.shape:
        raise Unfit("they do not all have one format")
    if own.table is not None and not torch.equal(own.table, stack.table):  # type: ignore[arg-type]
        raise Unfit("they do not all have one table")
    # torch copies no floats of 8 bits on some devices
    stack.numbers.view(torch.uint8)[rows] = own.numbers.view(torch.uint8)
    stack.scales[:, rows] = own.scales
    if own.offsets is not None and stack.offsets is not None:
        stack.offsets[:, rows] = own.offsets


def _kind(codes: DeviceCodes) -> tuple[object, ...]:
    is_there = codes.offsets is not None, codes.table is not None
    sizes = codes.inputs, codes.group_size, codes.numbers.shape[1]
    return *sizes, *is_there, codes.is_narrow, codes.shift, codes.numbers.dtype


def _stacked(orders: Sequence[torch.Tensor | None], inputs: int) -> torch.Tensor | None:
    """int32 [E, I]; None where no expert has an order."""
    given = [each for each in orders if each is not None]
    if not given:
        return None
    straight = torch.arange(inputs, device=given[0].device)
    return torch.stack([straight if each is None else each for each in orders]).int()
