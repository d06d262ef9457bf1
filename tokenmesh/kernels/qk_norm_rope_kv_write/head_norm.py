"""HeadNorm: the RMS norm that some families put over each query and key head."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Weights and place of the norm."""

    weight: torch.Tensor
    """float32 [heads + kv_heads, head_dim]: query heads, then key heads."""
    eps: float
    is_after_rope: bool = False
