"""Step: what all layers of one forward pass share."""

from dataclasses import dataclass

import torch

from tokenmesh.kernels.paged_attention import Prepared


@dataclass(frozen=True, slots=True)
class Step:
    """Positions, slots and attention work of a step, computed once for all layers."""

    turns: list[torch.Tensor]
    """For each of DecoderConfig.ropes: [T, 1, pairs] complex64."""
    slots: torch.Tensor
    """[T, 2 * kv_heads] rows of the pool that the new keys and values go to."""
    attention: dict[int | None, Prepared]
    """By window."""
    query_scale: torch.Tensor | None
    """[T, 1, 1] factor on queries, for models that grow them with the position."""
