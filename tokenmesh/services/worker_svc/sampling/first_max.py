"""first_max: argmax over a vocabulary in two steps, because torch's own is not vectorized."""

from typing import Final

import torch

MIN_BLOCK: Final = 64
"""Smaller blocks gain nothing."""


def first_max(values: torch.Tensor) -> torch.Tensor:
    """values [N, V], contiguous and without NaN -> [N] index of the first largest."""
    num_rows, size = values.shape
    block = size & -size
    if block < MIN_BLOCK or block == size:
        return values.argmax(-1)
    block = min(block, 1024)
    blocks = values.view(num_rows, size // block, block)
    best = blocks.amax(-1).argmax(-1, keepdim=True)
    inside = blocks.gather(1, best.unsqueeze(2).expand(num_rows, 1, block)).squeeze(1)
    return (best * block + inside.argmax(-1, keepdim=True)).squeeze(1)
