"""qk_norm_rope_kv_write on the CPU: its parts one after the other, in place."""

import torch

from tokenmesh.kernels.kv_write.cpu import kv_write
from tokenmesh.kernels.qk_norm_rope_kv_write.head_norm import HeadNorm
from tokenmesh.kernels.rms_norm.cpu import rms_norm
from tokenmesh.kernels.rope.cpu import rotate


def qk_norm_rope_kv_write(
    qkv: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    turns: torch.Tensor | None,
    norm: HeadNorm | None,
    query_scale: torch.Tensor | None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """slots [T, 2 * kv_heads] from `kv_write.slot_rows`; see the package."""
    first_value = qkv.shape[1] - pages.shape[2]
    first_key = first_value - pages.shape[2]
    query_key = qkv[:, :first_value]
    if norm is not None and not norm.is_after_rope:
        query_key.copy_(rms_norm(query_key, norm.weight, norm.eps))
    if turns is not None:
        rotate(query_key, turns)
    if norm is not None and norm.is_after_rope:
        query_key.copy_(rms_norm(query_key, norm.weight, norm.eps))
    kv_write(qkv[:, first_key:], pages, slots, k_scale, v_scale)
    query = qkv[:, :first_key]
    return query if query_scale is None else query * query_scale.to(qkv.dtype).view(-1, 1, 1)
