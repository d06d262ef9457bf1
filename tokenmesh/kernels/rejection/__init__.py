"""rejection: the token that follows from a draft, so that it has the model's distribution.

A draft is kept with probability min(1, p / q) of its token, p the model's probability and q that
with which it was drafted. Else the token is drawn from max(p - q, 0): the argmax of that over
`exponential_noise`. Both draws have seeds of their own, so that they depend neither on each other
nor on the draft, whose noise must be another one, too.

target     [M, V] float32  the model's probabilities at the place of each draft
draft      [M, V] float32  those that each draft was drawn with; None: each was certain
ids        [M] int64 or int32
seeds      [M] int64
positions  [M] int64       output position of the token
returns    [M] int64
"""

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.rejection import cpu
from tokenmesh.kernels.rejection.reference import rejection_reference

__all__ = ["rejection", "rejection_reference"]


def rejection(
    target: torch.Tensor,
    draft: torch.Tensor | None,
    ids: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """A new tensor [M]; nothing is waited for on a GPU."""
    if uses_triton(target):
        from tokenmesh.kernels.rejection import triton

        return triton.rejection(target, draft, ids, seeds, positions)
    return cpu.rejection(target, draft, ids, seeds, positions)
