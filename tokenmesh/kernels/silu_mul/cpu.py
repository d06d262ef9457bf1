"""silu_mul on the CPU: in C where the C kernels have been started, else in two passes."""

import torch

from tokenmesh.kernels.native import has_started, native_silu_mul
from tokenmesh.kernels.native.elementwise import fits


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2F] -> [T, F]."""
    if has_started() and fits(gate_up):
        return native_silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)
