"""The specification of causal_conv: token by token, in float64."""

import torch

from tokenmesh.kernels.state_rows import StateRows


def causal_conv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: StateRows,
    activation: str | None = None,
) -> torch.Tensor:
    """x [T, C], weight [C, W] -> [T, C], a new tensor; writes the rows' states."""
    out = torch.empty_like(x)
    for row in rows.spans():
        window = state[row.slot].double()
        if row.start == 0:
            window = torch.zeros_like(window)
        for token in range(row.first, row.last):
            seen = torch.cat([window, x[token].double()[:, None]], dim=1)
            value = (seen[:, -weight.shape[1] :] * weight.double()).sum(1)
            if bias is not None:
                value = value + bias.double()
            out[token] = torch.nn.functional.silu(value) if activation == "silu" else value
            window = seen[:, 1:]
        state[row.slot] = window
    return out
