"""silu_mul: silu(gate) * up, the activation of gated MLPs.

gate_up  [tokens, 2 * features]   gate in the first half, up in the second
returns  [tokens, features]       a new tensor
"""

from typing import Final

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.silu_mul.cpu import silu_mul as silu_mul_on_cpu
from tokenmesh.kernels.silu_mul.reference import silu_mul_reference

TOLERANCE: Final = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}

__all__ = ["TOLERANCE", "silu_mul", "silu_mul_reference"]


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2F] -> [T, F]."""
    if uses_triton(gate_up):
        from tokenmesh.kernels.silu_mul import triton

        return triton.silu_mul(gate_up)
    return silu_mul_on_cpu(gate_up)
