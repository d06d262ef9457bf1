"""rope: rotate pairs of features by an angle that depends on the position, in place.

x      [tokens, heads, head_dim]   float32 or bfloat16; features (2i, 2i+1) form pair i
turns  [tokens, 1, pairs]          complex64: exp(i * angle) times the attention scaling

Features from 2 * pairs on stay as they are (partial rotary). Checkpoints that pair feature i with
i + pairs are permuted at load (`interleave_rows`): one complex multiplication is then all there
is to do, and attention does not see the order because queries and keys share it.
"""

from typing import Final

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.rope.cpu import rotate as rotate_on_cpu
from tokenmesh.kernels.rope.reference import interleave_rows, rope_reference

TOLERANCE: Final = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}

__all__ = ["TOLERANCE", "interleave_rows", "rope_reference", "rotate"]


def rotate(x: torch.Tensor, turns: torch.Tensor) -> None:
    """Rotate x [T, H, D] by turns [T, 1, P] complex64, in place. Strides of x must be even."""
    if uses_triton(x):
        from tokenmesh.kernels.rope import triton

        triton.rotate(x, turns)
    else:
        rotate_on_cpu(x, turns)
