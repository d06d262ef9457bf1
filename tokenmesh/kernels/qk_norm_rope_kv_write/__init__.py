"""qk_norm_rope_kv_write: everything between the merged projection and attention, as one pass.

Norms and turns queries and keys, scales queries, writes keys and values into their pages.

qkv    [tokens, heads + 2 * kv_heads, head_dim]   query, key and value heads; overwritten
pages  [2, blocks, kv_heads, page_size, head_dim]   one layer's; see kv_write
slots        see kv_write
turns        [tokens, 1, pairs] complex64, see rope; None: no positions in this layer
norm         over each head's features; None: no such norm
query_scale  float32 [tokens]; None: 1
returns      [tokens, heads, head_dim]   the queries, as a view of qkv or a new tensor
"""

from typing import Final

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.qk_norm_rope_kv_write.cpu import (
    qk_norm_rope_kv_write as qk_norm_rope_kv_write_on_cpu,
)
from tokenmesh.kernels.qk_norm_rope_kv_write.head_norm import HeadNorm
from tokenmesh.kernels.qk_norm_rope_kv_write.reference import qk_norm_rope_kv_write_reference

TOLERANCE: Final = {torch.float32: 1e-5, torch.float16: 8e-3, torch.bfloat16: 4e-2}

__all__ = ["TOLERANCE", "HeadNorm", "qk_norm_rope_kv_write", "qk_norm_rope_kv_write_reference"]


def qk_norm_rope_kv_write(
    qkv: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    turns: torch.Tensor | None = None,
    norm: HeadNorm | None = None,
    query_scale: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """The queries of attention; keys and values are in their pages afterwards."""
    if uses_triton(qkv):
        from tokenmesh.kernels.qk_norm_rope_kv_write import triton

        return triton.qk_norm_rope_kv_write(
            qkv, pages, slots, turns, norm, query_scale, k_scale, v_scale
        )
    return qk_norm_rope_kv_write_on_cpu(
        qkv, pages, slots, turns, norm, query_scale, k_scale, v_scale
    )
