"""causal_conv: a convolution of each channel over a row's last tokens, with a state between steps.

x       [T, C]          tokens of a step, one row after the other; rows may be slices of wider ones
weight  [C, W]          the last column meets the token itself
bias    [C] or None
state   [slots, C, K]   a row's last K inputs, the newest last; K is W - 1 or more (transformers
                        keeps W); read where a row has a state, then written, in place
rows    see state_rows
returns [T, C]          in x's dtype; sums are float32
"""

from typing import Final, Literal

import torch

from tokenmesh.kernels.causal_conv.cpu import causal_conv as causal_conv_on_cpu
from tokenmesh.kernels.causal_conv.reference import causal_conv_reference
from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.state_rows import StateRows

TOLERANCE: Final = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

__all__ = ["TOLERANCE", "causal_conv", "causal_conv_reference"]


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: StateRows,
    activation: Literal["silu"] | None = None,
) -> torch.Tensor:
    """The convolved tokens [T, C]; the rows' states are those after their last token."""
    if state.shape[2] < weight.shape[1] - 1:
        raise ValueError(f"a state of {state.shape[2]} inputs for {weight.shape[1]} weights")
    if uses_triton(x):
        from tokenmesh.kernels.causal_conv import triton

        return triton.causal_conv(x, weight, bias, state, rows, activation)
    return causal_conv_on_cpu(x, weight, bias, state, rows, activation)
