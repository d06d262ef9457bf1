"""mamba2: the state-space recurrence of Mamba 2, with a state between steps.

A head's state S [P, N] decays and takes the token's input at its place:
    S = exp(dt A) S + dt x B^T;  out = S C + D x;  then out * silu(z)

x        [T, H, P]          tokens of a step, one row after the other
dt       [T, H]             time steps, before bias, softplus and limits
A        [H]                negative
B, C     [T, G, N]          H is a multiple of G; head h uses group h // (H // G)
state    [slots, H, P, N]   float32; read where a row has a state, then written, in place
rows     see state_rows
D        [H] or None
z        [T, H, P] or None
dt_bias  [H] or None; added to dt
dt_limit (least, most)      what dt is clamped to, after softplus
returns  [T, H, P]          in x's dtype; everything between is float32

Transformers clamps dt where it computes chunks but not where it computes one token on top of a
state; here every token is clamped, as a prompt may be cut anywhere.
Long rows go in chunks of CHUNK tokens whose borders are at positions divisible by CHUNK: the same
sums, to the last bits, for most of a prompt, however it was cut into steps.
"""

from typing import Final

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.mamba2.cpu import mamba2 as mamba2_on_cpu
from tokenmesh.kernels.mamba2.reference import mamba2_reference
from tokenmesh.kernels.state_rows import StateRows

TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}

__all__ = ["TOLERANCE", "mamba2", "mamba2_reference"]


def mamba2(
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
    """The outputs [T, H, P]; the rows' states are those after their last token."""
    if state.dtype != torch.float32:
        raise ValueError(f"the state is {state.dtype}, not float32")
    if x.shape[1] % B.shape[1]:
        raise ValueError(f"{x.shape[1]} heads for {B.shape[1]} groups")
    if uses_triton(x):
        from tokenmesh.kernels.mamba2 import triton

        return triton.mamba2(x, dt, A, B, C, state, rows, D, z, dt_bias, dt_limit)
    return mamba2_on_cpu(x, dt, A, B, C, state, rows, D, z, dt_bias, dt_limit)
