"""ExpertsSpec: what the experts of a layer compute, and how their weights lie."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
ACTIVATIONS: Final[tuple[Activation, ...]] = get_args(Activation)
"""Activations, in the order of `enum tm_activation` in experts.h and of `activate`."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExpertsSpec:
    """With gate and up, the results of w13 for one expert, the input of w2 is

        activation(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)

    or, without a gate, activation(up). Raises ValueError for what contradicts itself.
    """

    activation: Activation = "silu"
    is_gated: bool = True
    alpha: float = 1.0
    """silu is x * sigmoid(alpha * x)."""
    limit: float | None = None
    """Limit of gate and up; None: unlimited."""
    limits_activated_gate: bool = False
    """The limit is that of activation(gate) instead of gate."""
    up_offset: float = 0.0
    is_interleaved: bool = False
    """gate and up take turns among the outputs of w13; otherwise all gates come first."""
    is_transposed: bool = False
    """The weights are [E, inputs, outputs]; otherwise [E, outputs, inputs]."""
    b13: torch.Tensor | None = None
    """[E, 2I], or [E, I] without a gate; added to the outputs of w13."""
    b2: torch.Tensor | None = None
    """[E, H]; added to the outputs of w2, before the routing weight."""

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r}: experts have {ACTIVATIONS}")
        if self.alpha != 1.0 and self.activation != "silu":
            raise ValueError(f"alpha belongs to silu, not to {self.activation}")
        needs_gate = self.limit is not None or self.up_offset or self.is_interleaved
        if needs_gate and not self.is_gated:
            raise ValueError("limit, up_offset and is_interleaved belong to gated experts")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit {self.limit} is not above 0")
