"""The specification of staged_writes: one slice after the other; also what runs on a CPU."""

from itertools import pairwise

import torch


def staged_writes_reference(
    flat: torch.Tensor, destinations: torch.Tensor, starts: torch.Tensor, values: torch.Tensor
) -> None:
    runs = pairwise(starts.tolist())
    for destination, (begin, end) in zip(destinations.tolist(), runs, strict=True):
        flat[destination : destination + end - begin] = values[begin:end]
