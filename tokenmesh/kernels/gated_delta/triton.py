"""gated_delta on a GPU: rows of few tokens by `triton_recurrent`, others by `triton_chunk`.

Both are launched over all rows when a step has long ones, and each leaves the other's rows alone:
the host need not know which rows are long.
"""

from typing import Any

import torch
import triton

from tokenmesh.kernels.alignment import assert_aligned_rows
from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.gated_delta.cpu import CHUNK
from tokenmesh.kernels.gated_delta.triton_chunk import scan_kernel, solve_kernel
from tokenmesh.kernels.gated_delta.triton_recurrent import recurrent_kernel
from tokenmesh.kernels.gated_delta.triton_tiles import (
    FEW,
    RECURRENT_LAUNCH,
    SCAN_LAUNCH,
    SOLVE_LAUNCH,
    block_k,
    recurrent_block_v,
    scan_block_v,
    solve_constants,
)
from tokenmesh.kernels.state_rows import StateRows
from tokenmesh.kernels.state_rows.triton_chunk import max_chunks


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
    """See the package. Heads of a token must be next to each other."""
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not out.numel():
        return out
    tokens = [each.flatten(1) for each in (q, k, v, g, beta)]
    assert_aligned_rows(*tokens[:3])
    assert tokens[3].stride(1) == tokens[4].stride(1) == 1, "gates of a token are not contiguous"
    assert state.is_contiguous(), "a state is changed in place"
    where = (rows.slots, rows.cu_q, rows.starts)
    constants = {
        "HK": k.shape[1],
        "HV": v.shape[1],
        "DK": k.shape[2],
        "CHANNEL": g.ndim == 3,
        "NORM": use_qk_l2norm,
        "FEW": FEW,
        "BLOCK_K": block_k(k.shape[2]),
    }
    heads, value_dim = v.shape[1:]
    width = recurrent_block_v(value_dim)
    recurrent_kernel[(len(rows.slots), heads, triton.cdiv(value_dim, width))](
        *tokens,
        state,
        out,
        *where,
        scale,
        *(each.stride(0) for each in tokens),
        **constants,
        DV=value_dim,
        BLOCK_V=width,
        **RECURRENT_LAUNCH,
        **FUSED,
    )
    if rows.longest > FEW:
        _chunked(tokens, state, out, rows, scale, constants)
    return out


def _chunked(
    tokens: list[torch.Tensor],
    state: torch.Tensor,
    out: torch.Tensor,
    rows: StateRows,
    scale: float,
    constants: dict[str, Any],
) -> None:
    """tokens: q, k, v, g, beta, each [T, all heads]."""
    q, k, _, g, beta = tokens
    num_tokens, heads, value_dim = out.shape
    solved = torch.empty((2, num_tokens, heads, CHUNK), dtype=torch.float32, device=out.device)
    chunks = max_chunks(num_tokens, len(rows.slots), CHUNK)
    solve_kernel[(chunks, heads)](
        q,
        k,
        g,
        beta,
        *solved,
        rows.cu_q,
        rows.starts,
        len(rows.slots),
        scale,
        *(each.stride(0) for each in (q, k, g, beta)),
        **constants,
        **solve_constants(out.dtype),
        **SOLVE_LAUNCH,
        **FUSED,
    )
    width = scan_block_v(value_dim, constants["CHANNEL"])
    scan_kernel[(len(rows.slots), heads, triton.cdiv(value_dim, width))](
        *tokens,
        *solved,
        state,
        out,
        rows.slots,
        rows.cu_q,
        rows.starts,
        scale,
        *(each.stride(0) for each in tokens),
        **constants,
        DV=value_dim,
        BLOCK_V=width,
        CHUNK=CHUNK,
        **SCAN_LAUNCH,
        **FUSED,
    )
