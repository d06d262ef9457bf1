"""The specification of gelu_mul, in float64 and from the definitions."""

import math
from typing import Literal

import torch

Approximate = Literal["none", "tanh"]


def gelu_mul_reference(gate_up: torch.Tensor, approximate: Approximate) -> torch.Tensor:
    """gate_up [T, 2F] -> [T, F], rounded once to its dtype."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    if approximate == "tanh":
        share = 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    else:
        share = 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
    return (gate * share * up).to(gate_up.dtype)
