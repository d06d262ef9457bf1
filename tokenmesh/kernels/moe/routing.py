"""Routing: which experts a token gets, and with which weights, from the logits of its router."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch

Scores = Literal["softmax", "sigmoid"]
SCORES: Final[tuple[Scores, ...]] = get_args(Scores)
"""Scores, in the order of `enum tm_scores` in routed.h."""
_TINY: Final = 1e-20


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """A token gets the `top_k` experts of the highest scores, which are also their weights.

    Raises ValueError for what contradicts itself.
    """

    top_k: int
    scores: Scores
    """Softmax of all logits, or sigmoid of each logit."""
    is_normalized: bool = False
    """The weights are divided by their sum; with softmax, they are the softmax of those chosen."""
    scale: float = 1.0
    """And then multiplied by this."""

    def __post_init__(self) -> None:
        if self.scores not in SCORES:
            raise ValueError(f"scores {self.scores!r}: routing has {SCORES}")
        if self.top_k < 1:
            raise ValueError(f"top_k {self.top_k} is not above 0")


def route(
    logits: torch.Tensor, correction: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] -> ids [T, k] int64 and weights [T, k] float32.

    correction, float32 [E], is added to the scores that the choice is made by, not to the weights.
    """
    wide = logits.float()
    scores = wide.softmax(-1) if routing.scores == "softmax" else wide.sigmoid()
    order = scores if correction is None else scores + correction
    ids = order.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if routing.is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return ids, weights * routing.scale
