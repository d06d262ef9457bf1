"""gelu_mul on the CPU: two passes, the second in place."""

import torch


def gelu_mul(gate_up: torch.Tensor, approximate: str) -> torch.Tensor:
    """gate_up [T, 2F] -> [T, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate=approximate).mul_(up)
