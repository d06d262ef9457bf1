"""Arguments of `sample` other than the logits: parameters of all state rows; and its results."""

from dataclasses import dataclass
from typing import Final

import torch

SOUND: Final = 0
NOT_FINITE: Final = 1
"""The model computed NaN, infinity or nothing but minus infinity."""
NOTHING_ALLOWED: Final = 2
"""Every token was forbidden."""

HID_DEFECT: Final = 1
"""Mark of a row: a NaN or infinity was overwritten, so it cannot be seen any more."""
HID_NUMBER: Final = 2
"""Mark of a row: finite logits were overwritten, so minus infinity is not the model's doing."""


@dataclass(frozen=True, slots=True)
class ChoiceRows:
    """The choice of a token by each state row; R rows."""

    temperature: torch.Tensor
    """float32 [R]; 0 is greedy."""
    min_p: torch.Tensor
    """float32 [R]; 0 keeps everything."""
    top_k: torch.Tensor
    """int32 [R]; 0, or as much as the vocabulary, keeps everything."""
    top_p: torch.Tensor
    """float64 [R]; 1 keeps everything."""
    seed: torch.Tensor
    """int64 [R]"""
