"""A piece of work that an op does, and other ways to do the same."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

Compute = Callable[[], torch.Tensor]
"""Does the work once and returns what came out. Calling it again does the same work again."""


@dataclass(frozen=True, slots=True)
class Work:
    """One op on one batch."""

    run: Compute
    """The op as the engine calls it on this device."""
    reference: Compute
    """The specification."""
    torch_way: Compute | None
    """The same work as one would write it in torch: SDPA, F.linear, F.rms_norm."""
    num_bytes: int
    """Read and written at least."""
    num_flops: int
    """Multiplications and additions at least; 0: nothing to speak of."""
    tolerance: float
    """The most that run and reference may differ: absolute, on outputs of about 1."""


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The dimensions of the model whose layers are measured."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


def size_of(*tensors: torch.Tensor) -> int:
    """Bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
