"""moe: the experts of a mixture-of-experts layer, and `route`, which chooses those of a token.

x        [tokens, hidden]                float32, float16 or bfloat16
ids      [tokens, k] int64               experts of each token; E and -1: one that is not here and
                                         adds nothing (another number that is not an expert's adds
                                         nothing on a GPU and raises IndexError on a CPU)
weights  [tokens, k]                     float32 or x's dtype
w13      [E, 2 * inner, hidden]          gate and up; [E, inner, hidden] without a gate
w2       [E, hidden, inner]
returns  [tokens, hidden]                a new tensor in x's dtype: the sum over k of
                                         weight * w2(activation(w13(x))); ExpertsSpec has the rest

`pack` brings the weights into the form that the processor reads fastest: on a CPU with C kernels
into panels, of weights or of codes, on a GPU into the order above or into DeviceExperts, whose
codes are decoded to x's dtype in registers. Experts that are transposed or interleaved must be
packed before they run on a GPU.

Tolerance against the reference: see TOLERANCE, relative to the largest output or 1. A token's
result with the C kernels does not depend on the tokens computed with it; with torch's and Triton's
as little as that of a linear layer.
"""

from typing import Final

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.moe.cpu import (
    ExpertCodes,
    Weights,
    activated,
    pack,
    routed,
    slices_of,
    weight_of,
)
from tokenmesh.kernels.moe.cpu import experts as experts_on_cpu
from tokenmesh.kernels.moe.device_experts import DeviceExperts
from tokenmesh.kernels.moe.reference import experts_reference
from tokenmesh.kernels.moe.routing import SCORES, Routing, Scores, route
from tokenmesh.kernels.moe.spec import ACTIVATIONS, Activation, ExpertsSpec

TOLERANCE: Final = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

__all__ = [
    "ACTIVATIONS",
    "SCORES",
    "TOLERANCE",
    "Activation",
    "DeviceExperts",
    "ExpertCodes",
    "ExpertsSpec",
    "Routing",
    "Scores",
    "Weights",
    "activated",
    "experts",
    "experts_reference",
    "pack",
    "route",
    "routed",
    "slices_of",
    "weight_of",
]


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: Weights,
    w2: Weights,
    spec: ExpertsSpec,
) -> torch.Tensor:
    """x [T, H], ids and weights [T, k] -> [T, H]; w13 and w2 plain, or both from `pack`."""
    assert ids.shape == weights.shape
    assert ids.shape[0] == x.shape[0]
    if uses_triton(x):
        from tokenmesh.kernels.moe import triton

        assert isinstance(w13, torch.Tensor | DeviceExperts)
        assert isinstance(w2, torch.Tensor | DeviceExperts)
        return triton.experts(x, ids, weights, w13, w2, spec)
    return experts_on_cpu(x, ids, weights, w13, w2, spec)
