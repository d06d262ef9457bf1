"""Arguments of `penalties` other than the logits."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """Penalties and what was generated. Only rows that need it hold one of the S slots."""

    slot: torch.Tensor
    """int32 [R]: the slot of each state row; -1 for none."""
    repetition: torch.Tensor
    """float32 [S]; 1 does nothing."""
    presence: torch.Tensor
    """float32 [S]"""
    frequency: torch.Tensor
    """float32 [S]"""
    prompt: torch.Tensor
    """int32 [S, ceil(V / 32)]: bit i % 32 of word i // 32 says that token i is in the prompt."""
    counts: torch.Tensor
    """int32 [S, V]: how often each token was generated."""
