"""gated_delta on the CPU: rows of one token together, longer ones chunk by chunk.

A chunk is solved for all its changes at once: change i is beta_i times what value i differs by from
what key i finds, in the state before the chunk and in the changes before i, both decayed up to i.
That is a triangular system of the chunk's size. Rows of one token run in C where the C kernels have
been started.
"""

from typing import Final, NamedTuple

import torch

from tokenmesh.kernels.gated_delta.products import decayed_products, unit_lower_inverse
from tokenmesh.kernels.native import has_started, native_delta
from tokenmesh.kernels.native.states import MAX_KEY, fits
from tokenmesh.kernels.state_rows import SingleRows, StateRows

CHUNK: Final = 64
GATHERED_BYTES: Final = 1 << 18
"""Rows with smaller states are gathered; larger states are changed where they are, one by one."""


class DeltaTokens(NamedTuple):
    """Inputs by token, [T, heads, ...]; shapes as in the package."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    """[T, Hv, 1 or Dk]"""
    beta: torch.Tensor
    """[T, Hv, 1]"""

    def at(self, place: slice | torch.Tensor) -> "DeltaTokens":
        """Some of them, in float32."""
        return DeltaTokens(*(each[place].float() for each in self))

    def prepared(self, scale: float, use_qk_l2norm: bool) -> "DeltaTokens":
        """The same with a query and a key for each value head, normalized and scaled."""
        q, k = self.q, self.k
        if use_qk_l2norm:
            q = q * (q.square().sum(-1, keepdim=True) + 1e-6).rsqrt().mul_(scale)
            k = k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        else:
            q = q * scale
        shared = self.v.shape[1] // k.shape[1]
        if shared > 1:
            q, k = q.repeat_interleave(shared, 1), k.repeat_interleave(shared, 1)
        return self._replace(q=q, k=k)


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    rows: StateRows,
    scale: float,
    use_qk_l2norm: bool,
) -> torch.Tensor:
    out = torch.empty(v.shape, dtype=v.dtype)
    rows.clear(state)
    single = rows.single
    if single is not None and has_started() and k.shape[2] <= MAX_KEY and fits(state, q, k, v):
        at = (single.tokens, single.slots)
        native_delta(q, k, v, g, beta, state, *at, out, scale, use_qk_l2norm)
        single = None
    if single is None and not rows.long:
        return out
    log_decay = g if g.ndim == 3 else g[..., None]
    tokens = DeltaTokens(q, k, v, log_decay, beta[..., None])
    if single is not None:
        some = tokens.at(single.tokens).prepared(scale, use_qk_l2norm)
        out[single.tokens] = _decode(some, state, single).to(out.dtype)
    for row in rows.long:
        for place in row.chunks(CHUNK):
            some = tokens.at(place).prepared(scale, use_qk_l2norm)
            out[place] = _chunk(some, state[row.slot]).to(out.dtype)
    return out


def _decode(tokens: DeltaTokens, state: torch.Tensor, rows: SingleRows) -> torch.Tensor:
    """One token of each row -> [R, Hv, Dv]."""
    if state[:1].nbytes < GATHERED_BYTES:
        held = state[rows.slots]
        out = _step(tokens, held)
        state[rows.slots] = held
        return out
    steps = [
        _step(tokens.at(slice(number, number + 1)), state[row.slot : row.slot + 1])
        for number, row in enumerate(rows.spans)
    ]
    return torch.cat(steps)


def _step(tokens: DeltaTokens, held: torch.Tensor) -> torch.Tensor:
    """held [R, Hv, Dk, Dv] is changed. It is read once, for the key and the query together."""
    q, k = tokens.q, tokens.k
    decay = tokens.log_decay.exp()
    known, seen = (torch.stack([k * decay, q * decay], 2) @ held).unbind(2)
    change = tokens.beta * (tokens.v - known)
    added = k[..., None] * change[..., None, :]
    torch.addcmul(added, held, decay[..., None], out=held)
    return seen + (q * k).sum(-1, keepdim=True) * change


def _chunk(tokens: DeltaTokens, held: torch.Tensor) -> torch.Tensor:
    """The outputs [n, Hv, Dv] of a row's next n tokens; held [Hv, Dk, Dv] is changed."""
    q, k, v, log_decay, beta = (each.transpose(0, 1) for each in tokens)
    count = k.shape[1]
    # Differences of long sums: in float32 they would lose the short ones.
    fallen = log_decay.double().cumsum(1)
    keys, queries = decayed_products(torch.stack([k, q]), k, fallen)
    decay = fallen.float().exp()
    known, seen = (torch.cat([k * decay, q * decay], 1) @ held).split(count, 1)
    changes = unit_lower_inverse(keys * beta) @ (beta * (v - known))
    left = k * (fallen[:, -1:] - fallen).float().exp()
    torch.baddbmm(held * decay[:, -1, :, None], left.mT, changes, out=held)
    return torch.baddbmm(seen, queries, changes).transpose(0, 1)
