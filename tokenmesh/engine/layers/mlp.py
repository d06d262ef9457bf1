"""The gated MLP, and experts: a router, the experts it chooses for each token, a shared one."""

from dataclasses import dataclass
from typing import Literal

import torch

from tokenmesh.kernels.gelu_mul import gelu_mul
from tokenmesh.kernels.linear import Linear, linear
from tokenmesh.kernels.lora import LoraBank
from tokenmesh.kernels.lora.experts import experts_with_lora
from tokenmesh.kernels.moe import ExpertsSpec, Routing, Weights, route
from tokenmesh.kernels.silu_mul import silu_mul

Activation = Literal["silu", "gelu", "gelu_tanh"]
"""Activation of a gated MLP; "gelu" is the exact one."""


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


@dataclass(frozen=True, slots=True)
class Experts:
    """Weights of one layer's experts, in the place of an `Mlp`."""

    routing: Routing
    router: Linear
    """hidden -> E, of float32 where `is_wide`."""
    is_wide: bool
    """The router reads tokens in float32, whatever the model's dtype."""
    correction: torch.Tensor | None
    """float32 [E], see `route`."""
    w13: Weights
    w2: Weights
    spec: ExpertsSpec
    shared: Mlp | None
    shared_gate: Linear | None
    """hidden -> 1: its sigmoid is what the shared expert counts; None: it counts in full."""
    adapters: LoraBank | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        logits = linear(x.float() if self.is_wide else x, self.router)
        ids, weights = route(logits, self.correction, self.routing)
        out = experts_with_lora(x, ids, weights, self.w13, self.w2, self.spec, self.adapters)
        if self.shared is None:
            return out
        more = self.shared.forward(x)
        if self.shared_gate is not None:
            more *= linear(x, self.shared_gate).sigmoid()
        return out.add_(more)
