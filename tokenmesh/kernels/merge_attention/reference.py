"""The specification of merge_attention, in float64; on a CPU also what runs."""

from typing import Final

import torch

TOLERANCE: Final = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Largest absolute difference of an implementation from the reference, for values of size 1."""


def merge_attention_reference(
    first: torch.Tensor,
    first_lse: torch.Tensor,
    second: torch.Tensor,
    second_lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, H * D] and [T, H] twice -> [T, H * D], [T, H]."""
    lse = first_lse.double().logaddexp(second_lse.double())
    out = torch.zeros(*lse.shape, first.shape[1] // lse.shape[1]).to(lse)
    for values, side in ((first, first_lse), (second, second_lse)):
        share = (side.double() - lse).exp().unsqueeze(-1)
        out += torch.where(side.unsqueeze(-1) > -torch.inf, values.view(out.shape) * share, 0)
    return out.flatten(1).to(first.dtype), lse.float()
