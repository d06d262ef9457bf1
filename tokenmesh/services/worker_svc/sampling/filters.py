"""Filters: which tokens min_p, top_k and top_p leave, in this order.

Each keeps all tokens whose weight is at least some floor, so the outcome does not depend on how
equal weights happen to be sorted. Weights are exp(logit - best logit): the best is 1.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from tokenmesh.shared.messages.sampling import SamplingParams

_BITS_OF_ONE: Final = 0x3F800000
"""1.0 as float32; up to it, positive floats sort like their bits."""


@dataclass(frozen=True, slots=True)
class Filters:
    """The three parameters of N rows."""

    min_p: torch.Tensor
    """float32 [N, 1]"""
    top_p: torch.Tensor
    """float64 [N, 1]"""
    top_k: torch.Tensor
    """int64 [N, 1]; 0 keeps everything."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "Filters":
        """Gather them."""
        return cls(
            min_p=torch.tensor([p.min_p for p in params]).unsqueeze(1),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64).unsqueeze(1),
            top_k=torch.tensor([p.top_k for p in params]).unsqueeze(1),
        )


def has_filter(params: SamplingParams) -> bool:
    """Whether any of the three does anything."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def candidate_floors(
    weights: torch.Tensor, totals: torch.Tensor, filters: Filters
) -> tuple[torch.Tensor, torch.Tensor]:
    """The floor of each row [N, 1] from its best K weights [N, K], sorted.

    totals [N, 1] are sums over the whole vocabulary, needed where neither min_p nor top_k is set.
    Also returns which rows [N] are left with tokens among the K only, so that their floor is right.
    """
    count = weights.shape[1]
    has_top_k = (filters.top_k > 0) & (filters.top_k < count)
    kth = weights.gather(1, filters.top_k.clamp(1, count) - 1)
    limit = torch.where(has_top_k, torch.maximum(filters.min_p, kth), filters.min_p)
    kept = weights * (weights >= limit)
    # sums of a prefix are the same whatever K is
    sums = kept.double().cumsum(-1)
    # a top_k beyond the tokens that are possible at all has limit 0, and they are all here
    totals = torch.where(has_top_k | (limit > 0), sums[:, -1:], totals)
    num_within = ((sums - kept) < filters.top_p * totals).sum(-1, keepdim=True).clamp_(min=1)
    nucleus = weights.gather(1, num_within - 1)
    floor = torch.where(filters.top_p < 1.0, torch.maximum(limit, nucleus), limit)
    # a limit inside the candidates makes their sum the total; without one, the floor must be inside
    is_right = weights[:, -1:] < torch.where(limit > 0, limit, floor)
    return floor, is_right.squeeze(1)


def exact_floor(weights: torch.Tensor, params: SamplingParams) -> float:
    """The floor of one row from all its weights [V], without sorting them.

    top_p: the smallest float t so that less than top_p of the mass lies above it, by bisection over
    the bits of t; a sort of a large vocabulary takes ten times as long.
    """
    limit = params.min_p
    if 0 < params.top_k < len(weights):
        limit = max(limit, float(weights.topk(params.top_k).values[-1]))
    if params.top_p >= 1.0:
        return limit
    kept = weights * (weights >= limit)
    target = params.top_p * float(kept.sum())
    low, high = -1, _BITS_OF_ONE
    while high - low > 1:
        middle = (low + high) // 2
        above = float(torch.nn.functional.threshold(kept, _float_of(middle), 0.0).sum())
        low, high = (low, middle) if above < target else (middle, high)
    return max(limit, _float_of(high))


def _float_of(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])
