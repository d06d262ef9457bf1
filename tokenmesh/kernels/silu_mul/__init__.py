"""silu_mul: silu(gate) * up, the activation of gated MLPs.

gate_up  [tokens, 2 * features]   gate in the first half, up in the second
returns  [tokens, features]       a new tensor
"""

from typing import Final

import torch

from tokenmesh.kernels.silu_mul.cpu import silu_mul
from tokenmesh.kernels.silu_mul.reference import silu_mul_reference

TOLERANCE: Final = {torch.float32: 1e-6, torch.bfloat16: 2e-2}

__all__ = ["TOLERANCE", "silu_mul", "silu_mul_reference"]
