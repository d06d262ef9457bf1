"""rms_norm: x / sqrt(mean(x * x) + eps) * weight over the last dimension.

x        [..., features]     float32 or bfloat16; the last dimension contiguous
weight   [features], or [n, features] for x [..., n, features]; float32
returns  [..., features]     a new tensor

add_rms_norm adds alpha * x to the residual stream hidden [tokens, features] in place and returns
rms_norm of the sum as stored: one pass over memory on a GPU instead of two.
"""

from typing import Final

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.rms_norm.cpu import rms_norm as rms_norm_on_cpu
from tokenmesh.kernels.rms_norm.reference import add_rms_norm_reference, rms_norm_reference

TOLERANCE: Final = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}

__all__ = [
    "TOLERANCE",
    "add_rms_norm",
    "add_rms_norm_reference",
    "rms_norm",
    "rms_norm_reference",
]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """A new tensor of x's shape."""
    if uses_triton(x):
        from tokenmesh.kernels.rms_norm import triton

        return triton.rms_norm(x, weight, eps)
    return rms_norm_on_cpu(x, weight, eps)


def add_rms_norm(
    hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, alpha: float = 1.0
) -> torch.Tensor:
    """hidden += alpha * x; returns the norm of hidden, a new tensor."""
    if uses_triton(hidden):
        from tokenmesh.kernels.rms_norm import triton

        return triton.add_rms_norm(hidden, x, weight, eps, alpha)
    return rms_norm_on_cpu(hidden.add_(x, alpha=alpha), weight, eps)
