"""Codes: a weight as small integers, with scales that groups of inputs share.

Most formats are the same thing in different places. What they have in common is what kernels read:
weight[o, i] = scales[o, i // group] * number(numbers[o, i]) + offsets[o, i // group].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch

Kind = Literal["integers", "table", "e4m3"]
TABLE_SIZE: Final = 16
_WIDTHS: Final = (4, 5, 6, 8)
"""Bits that codes may have."""


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight [O, I], on any device."""

    numbers: torch.Tensor
    """uint8 [O, I], one code each, below 2 ** bits."""
    bits: int
    """4, 5, 6 or 8."""
    scales: torch.Tensor
    """float32 [O, G]; a group is `group_size` inputs."""
    group_size: int
    offsets: torch.Tensor | None = None
    """float32 [O, G]."""
    kind: Kind = "integers"
    """The number of a code: code - center, table[code] - center, or a float of 8 bits."""
    center: int = 0
    table: tuple[int, ...] | None = None
    """16 bytes."""
    order: torch.Tensor | None = None
    """int64 [I]: column j is of input order[j]; None: of input j."""
    rounds_inputs: bool = False
    """True where the format rounds the weight's inputs to 8 bits as well."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.numbers.shape[0], self.numbers.shape[1]

    def decoded(self) -> torch.Tensor:
        """float32 [O, I]: the weight."""
        if self.kind == "e4m3":
            values = e4m3_numbers(self.numbers)
        elif self.kind == "table":
            assert self.table is not None
            table = torch.tensor(self.table, device=self.numbers.device, dtype=torch.float32)
            values = table[self.numbers.int()] - self.center
        else:
            values = self.numbers.float().sub_(self.center)
        inputs, groups = self.numbers.shape[1], self.scales.shape[1]
        if groups == 1 or inputs == groups * self.group_size:
            by_group = values.view(len(values), groups, -1)
            by_group *= self.scales[..., None]
            if self.offsets is not None:
                by_group += self.offsets[..., None]
        else:
            group = torch.arange(inputs, device=values.device) // self.group_size
            values *= self.scales[:, group]
            if self.offsets is not None:
                values += self.offsets[:, group]
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order, values)

    def is_finite(self) -> bool:
        """Return whether every number of the weight is finite."""
        if self.kind == "e4m3" and bool(((self.numbers & 127) == 127).any()):
            return False
        factors = [self.scales] if self.offsets is None else [self.scales, self.offsets]
        return all(bool(each.isfinite().all()) for each in factors)

    def to(self, device: torch.device) -> "Codes":
        """The same on a device."""
        offsets = None if self.offsets is None else self.offsets.to(device)
        order = None if self.order is None else self.order.to(device)
        return replace(
            self,
            numbers=self.numbers.to(device),
            scales=self.scales.to(device),
            offsets=offsets,
            order=order,
        )

    def rows(self, index: torch.Tensor) -> "Codes":
        """Some of the outputs, in the order of `index` [N]."""
        offsets = None if self.offsets is None else self.offsets[index]
        return replace(
            self, numbers=self.numbers[index], scales=self.scales[index], offsets=offsets
        )

    def columns(self, part: slice) -> "Codes | None":
        """The weight of some of the inputs, as the same numbers: groups are refined where one lies
        across a border. None where inputs have an order of their own."""
        if self.order is not None:
            return None
        inputs, count = self.shape[1], self.scales.shape[1]
        size = inputs if count == 1 else self.group_size
        new = math.gcd(size, part.start, part.stop)
        whole = self if new == size else _as(self, self.bits, self.center, new)
        groups = slice(part.start // new, part.stop // new)
        if count == 1:
            whole, new, groups = self, part.stop - part.start, slice(0, 1)
        offsets = None if whole.offsets is None else whole.offsets[:, groups].contiguous()
        return replace(
            whole,
            numbers=whole.numbers[:, part].contiguous(),
            scales=whole.scales[:, groups].contiguous(),
            group_size=new,
            offsets=offsets,
        )


def e4m3_numbers(codes: torch.Tensor) -> torch.Tensor:
    """float32 numbers of bytes that are E4M3. torch's own conversion takes four times as long on a
    CPU."""
    codes = codes.view(torch.uint8)
    if codes.is_cuda:
        return codes.view(torch.float8_e4m3fn).float()
    # as halves, whose exponents are 8 too low
    wide = codes.to(torch.int16)
    halves = ((wide & 127) << 7).bitwise_or_(wide.bitwise_and_(128) << 8)
    numbers = halves.view(torch.float16).float().mul_(256)
    is_nan = (codes & 127) == 127
    return numbers.masked_fill_(is_nan, torch.nan) if bool(is_nan.any()) else numbers


def merged(parts: Sequence[Codes]) -> Codes | None:
    """One weight of several that read the same inputs; their outputs follow each other.

    Integers of fewer bits, or in larger groups, become those of the others: the numbers stay what
    they are. None where the parts differ in more than that.
    """
    if len(parts) == 1:
        return parts[0]
    parts = _alike(parts)
    if not parts:
        return None
    first = parts[0]
    offsets = None
    if any(each.offsets is not None for each in parts):
        offsets = torch.cat(
            [torch.zeros_like(p.scales) if p.offsets is None else p.offsets for p in parts]
        )
    return replace(
        first,
        numbers=torch.cat([each.numbers for each in parts]),
        scales=torch.cat([each.scales for each in parts]),
        offsets=offsets,
    )


def _alike(parts: Sequence[Codes]) -> Sequence[Codes]:
    """The parts with the same bits, center, groups and order; empty where that is not possible."""
    first = parts[0]
    if any(_fixed(each) != _fixed(first) or not _same_order(each, first) for each in parts):
        return []
    inputs = first.shape[1]
    sizes = [min(each.group_size, inputs) for each in parts]
    size = math.gcd(*sizes)
    if any(whole % size for whole in sizes):
        return []
    center = max(each.center for each in parts)
    most = max((1 << each.bits) + center - each.center for each in parts)
    if first.kind != "integers" and any(each.center != center for each in parts):
        return []
    bits = next((each for each in _WIDTHS if 1 << each >= most), None)
    if bits is None:
        return []
    return [_as(each, bits, center, size) for each in parts]


def _fixed(codes: Codes) -> tuple[object, ...]:
    """Return the properties that no part can take over from another."""
    return codes.shape[1], codes.kind, codes.table, codes.rounds_inputs


def _same_order(a: Codes, b: Codes) -> bool:
    if a.order is None or b.order is None:
        return a.order is b.order
    return torch.equal(a.order, b.order)


def _as(codes: Codes, bits: int, center: int, size: int) -> Codes:
    """The same numbers with other bits, a center that is not lower, and groups of `size`."""
    inputs = codes.shape[1]
    repeated = min(codes.group_size, inputs) // size
    scales, offsets = codes.scales, codes.offsets
    if repeated > 1:
        count = -(-inputs // size)
        scales = scales.repeat_interleave(repeated, 1)[:, :count]
        offsets = None if offsets is None else offsets.repeat_interleave(repeated, 1)[:, :count]
    numbers = codes.numbers
    if center != codes.center:
        numbers = numbers + (center - codes.center)
    return replace(
        codes,
        numbers=numbers,
        bits=bits,
        scales=scales,
        group_size=size,
        offsets=offsets,
        center=center,
    )
