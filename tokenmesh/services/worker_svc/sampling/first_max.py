"""first_max: argmax over a vocabulary by numpy, which is vectorized and starts no threads."""

import torch


def first_max(values: torch.Tensor) -> torch.Tensor:
    """values [N, V] without NaN -> [N] int64 index of the first largest."""
    return torch.from_numpy(values.numpy().argmax(-1))
