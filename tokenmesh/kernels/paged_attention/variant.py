"""Variant: what a layer's attention does in addition to plain softmax."""

from dataclasses import dataclass
from typing import Final

import torch


@dataclass(frozen=True, slots=True)
class Variant:
    softcap: float | None = None
    """Logits become softcap * tanh(logit / softcap)."""
    sinks: torch.Tensor | None = None
    """[heads] A logit for each head that joins the softmax's denominator and has no value."""
    k_scale: float = 1.0
    """Factor of stored keys, for pages in 8 bits."""
    v_scale: float = 1.0
    """Factor of stored values, for pages in 8 bits."""
    value_dim: int | None = None
    """Width of a value, where keys and values differ: pages are as wide as the wider of the two,
    the query as the key. None: all have one width."""


PLAIN: Final = Variant()


def variant_of(
    softcap: float | None, sinks: torch.Tensor | None, k_scale: float = 1.0, v_scale: float = 1.0
) -> Variant:
    """PLAIN, which is the fastest, unless there is something to do."""
    if softcap is None and sinks is None and k_scale == v_scale == 1:
        return PLAIN
    return Variant(softcap, sinks, k_scale, v_scale)
