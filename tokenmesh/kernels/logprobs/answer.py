"""Logprobs: what `logprobs` returns."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of A rows, with n alternatives each."""

    chosen: torch.Tensor
    """float32 [A]: the token's log-probability."""
    ranks: torch.Tensor
    """int32 [A]: 1 and how many tokens have larger logits."""
    top_ids: torch.Tensor
    """int32 [A, n]: the most likely, best first; of equals the smallest id first."""
    top: torch.Tensor
    """float32 [A, n]: their log-probabilities."""
