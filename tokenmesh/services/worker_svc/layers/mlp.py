"""The gated MLP: down(silu(gate(x)) * up(x)), gate and up in one projection."""

from dataclasses import dataclass

import torch

from tokenmesh.kernels.linear import Linear, linear
from tokenmesh.kernels.silu_mul import silu_mul


@dataclass(frozen=True, slots=True)
class Mlp:
    """Weights of one layer's MLP."""

    gate_up: Linear
    down: Linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return linear(silu_mul(linear(x, self.gate_up)), self.down)
