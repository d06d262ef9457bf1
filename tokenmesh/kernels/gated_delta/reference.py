"""The specification of gated_delta: token by token, in float64."""

import torch

from tokenmesh.kernels.state_rows import StateRows


def gated_delta_reference(
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
    """See the package. Returns a new tensor; writes the rows' states."""
    query, key = q.double(), k.double()
    if use_qk_l2norm:
        query = query / (query.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        key = key / (key.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    query = query * (k.shape[2] ** -0.5 if scale is None else scale)
    key_head = torch.arange(v.shape[1], device=v.device) // (v.shape[1] // k.shape[1])
    query, key = query[:, key_head], key[:, key_head]
    decay = (g if g.ndim == 3 else g[..., None]).double().exp()[..., None]
    out = torch.empty_like(v)
    for row in rows.spans():
        held = state[row.slot].double()
        if row.start == 0:
            held = torch.zeros_like(held)
        for t in range(row.first, row.last):
            held = held * decay[t]
            known = (held * key[t, :, :, None]).sum(1)
            change = beta[t, :, None].double() * (v[t].double() - known)
            held = held + key[t, :, :, None] * change[:, None]
            out[t] = (held * query[t, :, :, None]).sum(1)
        state[row.slot] = held
    return out
