"""Writes to the rows' state in the form in which they travel: destinations, starts, values."""

from itertools import chain

import torch

from tokenmesh.kernels.staged_writes import staged_writes


def pack_writes(writes: list[tuple[int, list[int]]]) -> torch.Tensor:
    """(address, values) -> int32 words; empty when there is nothing to write."""
    if not writes:
        return torch.empty(0, dtype=torch.int32)
    destinations = torch.tensor([address for address, _ in writes])
    starts = torch.tensor([0] + [len(values) for _, values in writes]).cumsum(0).int()
    values = torch.tensor(list(chain.from_iterable(v for _, v in writes)), dtype=torch.int32)
    return torch.cat([destinations.view(torch.int32), starts, values])


def apply_writes(flat: torch.Tensor, packed: torch.Tensor, count: int) -> None:
    """Write what `pack_writes` made of `count` writes, on the device."""
    destinations = packed[: 2 * count].view(torch.int64)
    staged_writes(flat, destinations, packed[2 * count : 3 * count + 1], packed[3 * count + 1 :])
