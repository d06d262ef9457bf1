"""gated_delta: linear attention by the gated delta rule, with a state between steps.

A head's state S [Dk, Dv] decays, forgets what its key holds, and takes the key's new value:
    S = exp(g) S;  S = S + beta k (v - S^T k)^T;  out = scale S^T q

q, k     [T, Hk, Dk]        tokens of a step, one row after the other
v        [T, Hv, Dv]        Hv is a multiple of Hk; value head h uses key head h // (Hv // Hk)
g        [T, Hv]            logarithm of the decay, at most 0; [T, Hv, Dk]: of each channel (KDA)
beta     [T, Hv]            how much of the new value is taken
state    [slots, Hv, Dk, Dv]   float32; read where a row has a state, then written, in place
rows     see state_rows
returns  [T, Hv, Dv]        in v's dtype; everything between is float32

Long rows go in chunks of CHUNK tokens whose borders are at positions divisible by CHUNK: the same
sums, to the last bits, for most of a prompt, however it was cut into steps.
"""

from typing import Final

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.gated_delta.cpu import gated_delta as gated_delta_on_cpu
from tokenmesh.kernels.gated_delta.reference import gated_delta_reference
from tokenmesh.kernels.state_rows import StateRows

TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}

__all__ = ["TOLERANCE", "gated_delta", "gated_delta_reference"]


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    rows: StateRows,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
) -> torch.Tensor:
    """The outputs [T, Hv, Dv]; the rows' states are those after their last token.

    scale: of the queries; None: Dk ** -0.5. use_qk_l2norm: queries and keys are first divided by
    their lengths, sqrt(sum of squares + 1e-6).
    """
    if state.dtype != torch.float32:
        raise ValueError(f"the state is {state.dtype}, not float32")
    if v.shape[1] % k.shape[1]:
        raise ValueError(f"{v.shape[1]} value heads for {k.shape[1]} key heads")
    scale = k.shape[2] ** -0.5 if scale is None else scale
    if uses_triton(v):
        from tokenmesh.kernels.gated_delta import triton

        return triton.gated_delta(q, k, v, g, beta, state, rows, scale, use_qk_l2norm)
    return gated_delta_on_cpu(q, k, v, g, beta, state, rows, scale, use_qk_l2norm)
