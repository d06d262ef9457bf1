"""gelu_mul: gelu(gate) * up, the activation of gated MLPs of the Gemma kind.

gate_up      [tokens, 2 * features]   gate in the first half, up in the second
approximate  "none" (erf) or "tanh", as torch.nn.functional.gelu has it
returns      [tokens, features]       a new tensor
"""

from typing import Final

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.gelu_mul.cpu import gelu_mul as gelu_mul_on_cpu
from tokenmesh.kernels.gelu_mul.reference import Approximate, gelu_mul_reference

TOLERANCE: Final = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}

__all__ = ["TOLERANCE", "Approximate", "gelu_mul", "gelu_mul_reference"]


def gelu_mul(gate_up: torch.Tensor, approximate: Approximate) -> torch.Tensor:
    """gate_up [T, 2F] -> [T, F]."""
    if uses_triton(gate_up):
        from tokenmesh.kernels.gelu_mul import triton

        return triton.gelu_mul(gate_up, approximate)
    return gelu_mul_on_cpu(gate_up, approximate)
