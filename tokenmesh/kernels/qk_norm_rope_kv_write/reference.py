"""The specification of qk_norm_rope_kv_write, in float64 with one rounding at the end."""

from collections.abc import Sequence

import torch

from tokenmesh.kernels.kv_write.reference import kv_write_reference
from tokenmesh.kernels.qk_norm_rope_kv_write.head_norm import HeadNorm
from tokenmesh.kernels.rms_norm.reference import rms_norm_reference
from tokenmesh.kernels.rope.reference import rope_reference


def qk_norm_rope_kv_write_reference(
    qkv: torch.Tensor,
    pages: torch.Tensor,
    slots: Sequence[tuple[int, int]],
    turns: torch.Tensor | None = None,
    norm: HeadNorm | None = None,
    query_scale: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """slots: (block, offset in the page) of each token. Writes pages; returns the queries."""
    first_value = qkv.shape[1] - pages.shape[2]
    first_key = first_value - pages.shape[2]
    query_key = qkv[:, :first_value].double()
    if norm is not None and not norm.is_after_rope:
        query_key = rms_norm_reference(query_key, norm.weight, norm.eps)
    if turns is not None:
        query_key = rope_reference(query_key, turns)
    if norm is not None and norm.is_after_rope:
        query_key = rms_norm_reference(query_key, norm.weight, norm.eps)
    query = query_key[:, :first_key]
    if query_scale is not None:
        query = query * query_scale.double().view(-1, 1, 1)
    keys_values = torch.cat([query_key[:, first_key:], qkv[:, first_value:].double()], dim=1)
    kv_write_reference(keys_values, pages, slots, k_scale, v_scale)
    return query.to(qkv.dtype)
