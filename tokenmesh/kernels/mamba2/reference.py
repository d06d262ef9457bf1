"""The specification of mamba2: token by token, in float64."""

import torch

from tokenmesh.kernels.state_rows import StateRows


def mamba2_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    state: torch.Tensor,
    rows: StateRows,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> torch.Tensor:
    """See the package. Returns a new tensor; writes the rows' states."""
    step = dt.double() if dt_bias is None else dt.double() + dt_bias.double()
    step = torch.nn.functional.softplus(step).clamp(*dt_limit)
    group = torch.arange(x.shape[1], device=x.device) // (x.shape[1] // B.shape[1])
    gain, read = B[:, group].double(), C[:, group].double()
    out = torch.empty_like(x)
    for row in rows.spans():
        held = state[row.slot].double()
        if row.start == 0:
            held = torch.zeros_like(held)
        for t in range(row.first, row.last):
            entered = step[t, :, None] * x[t].double()
            held = held * (step[t] * A.double()).exp()[:, None, None]
            held = held + entered[..., None] * gain[t, :, None]
            value = (held * read[t, :, None]).sum(-1)
            if D is not None:
                value = value + D.double()[:, None] * x[t].double()
            out[t] = value if z is None else value * torch.nn.functional.silu(z[t].double())
        state[row.slot] = held
    return out
