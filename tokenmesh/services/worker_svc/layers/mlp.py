"""The gated MLP: down(activation(gate(x)) * up(x)), gate and up in one projection."""

from dataclasses import dataclass

import torch

from tokenmesh.kernels.gelu_mul import gelu_mul
from tokenmesh.kernels.linear import Linear, linear
from tokenmesh.kernels.silu_mul import silu_mul
from tokenmesh.services.worker_svc.models.native.config import Activation


@dataclass(frozen=True, slots=True)
class Mlp:
    """Weights of one layer's MLP."""

    gate_up: Linear
    down: Linear
    activation: Activation = "silu"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return linear(activated(linear(x, self.gate_up), self.activation), self.down)


def activated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """gate_up [T, 2F] -> activation(gate) * up [T, F]."""
    if activation == "silu":
        return silu_mul(gate_up)
    return gelu_mul(gate_up, "tanh" if activation == "gelu_tanh" else "none")
