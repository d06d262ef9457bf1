"""Codes: a weight as small integers, with scales that groups of inputs share.

Most formats are the same thing in different places. What they have in common is what kernels read:
weight[o, i] = scales[o, i // group] * number(numbers[o, i]) + offsets[o, i // group].
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch

Kind = Literal["integers", "table", "e4m3"]
TABLE_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight [O, I], on any device."""

    numbers: torch.Tensor
    """uint8 [O, I], one code each, below 2 ** bits."""
    bits: int
    """4 or 8."""
    scales: torch.Tensor
    """float32 [O, G]; a group is `group_size` inputs."""
    group_size: int
    offsets: torch.Tensor | None = None
    """float32 [O, G]."""
    kind: Kind = "integers"
    """What a code stands for: code - center, table[code] - center, or a float of 8 bits."""
    center: int = 0
    table: tuple[int, ...] | None = None
    """16 bytes."""
    order: torch.Tensor | None = None
    """int64 [I]: column j is of input order[j]; None: of input j."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.numbers.shape[0], self.numbers.shape[1]

    def decoded(self) -> torch.Tensor:
        """float32 [O, I]: the weight."""
        if self.kind == "e4m3":
            values = self.numbers.view(torch.float8_e4m3fn).float()
        elif self.kind == "table":
            assert self.table is not None
            table = torch.tensor(self.table, device=self.numbers.device, dtype=torch.float32)
            values = table[self.numbers.int()] - self.center
        else:
            values = self.numbers.float() - self.center
        inputs = self.numbers.shape[1]
        group = torch.arange(inputs, device=values.device) // self.group_size
        values *= self.scales[:, group]
        if self.offsets is not None:
            values += self.offsets[:, group]
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order, values)

    def is_finite(self) -> bool:
        """Whether every number of the weight is finite."""
        if self.kind == "e4m3" and bool(((self.numbers & 127) == 127).any()):
            return False
        factors = [self.scales] if self.offsets is None else [self.scales, self.offsets]
        return all(bool(each.isfinite().all()) for each in factors)

    def rows(self, index: torch.Tensor) -> "Codes":
        """Some of the outputs, in the order of `index` [N]."""
        offsets = None if self.offsets is None else self.offsets[index]
        return replace(
            self, numbers=self.numbers[index], scales=self.scales[index], offsets=offsets
        )


def merged(parts: Sequence[Codes]) -> Codes | None:
    """One weight of several that read the same inputs; None where they differ in more than that.

    Their outputs follow each other.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(_alike(each) != _alike(first) for each in parts):
        return None
    orders = [each.order for each in parts]
    if any((each is None) != (orders[0] is None) for each in orders):
        return None
    if orders[0] is not None and any(not torch.equal(orders[0], each) for each in orders):  # type: ignore[arg-type]
        return None
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


def _alike(codes: Codes) -> tuple[object, ...]:
    inputs = codes.shape[1]
    return inputs, codes.bits, codes.kind, codes.center, codes.table, codes.group_size
