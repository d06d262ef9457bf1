"""Paged attention on the CPU: gather pages, then grouped matmul (decode) or SDPA (prefill).

A page of one kv head is contiguous, so a gather is a list of memory copies and its result is
already [kv_heads, keys, head_dim]. SDPA with one bfloat16 query is six times slower than the two
matmuls over the whole group of query heads.
"""

import torch

from tokenmesh.kernels.page_codes import is_coded
from tokenmesh.kernels.paged_attention import cpu_variant
from tokenmesh.kernels.paged_attention.gather import gather
from tokenmesh.kernels.paged_attention.variant import PLAIN, Variant
from tokenmesh.kernels.paged_attention.work import DecodeGroup, PrefillTile, Prepared


def paged_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    prepared: Prepared,
    scale: float,
    variant: Variant = PLAIN,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [T, H, D] -> [T, H * D]; fills lse, float32 [T, H], if there is one."""
    if variant is not PLAIN or lse is not None or is_coded(pages.dtype):
        return cpu_variant.paged_attention(query, pages, prepared, scale, variant, lse)
    if len(prepared.decode) == 1 and not prepared.prefill:
        return _decode(query, pages, prepared.decode[0], scale)
    out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
    for group in prepared.decode:
        out[group.tokens] = _decode(query[group.tokens], pages, group, scale)
    for tile in prepared.prefill:
        out[tile.tokens] = _prefill(query[tile.tokens], pages, tile, scale)
    return out


def _decode(
    query: torch.Tensor, pages: torch.Tensor, group: DecodeGroup, scale: float
) -> torch.Tensor:
    gather(pages, group)
    mask = group.mask
    by_kv_head = query.to(mask.dtype).reshape(mask.shape[0], -1, pages.shape[4])
    scores = torch.baddbmm(mask, by_kv_head, group.keys, alpha=scale)
    mixed = torch.bmm(scores.softmax(-1), group.values)
    return mixed.view(len(query), -1).to(query.dtype)


def _prefill(
    query: torch.Tensor, pages: torch.Tensor, tile: PrefillTile, scale: float
) -> torch.Tensor:
    kv_heads, head_dim = pages.shape[2], pages.shape[4]
    num_queries, heads = query.shape[0], query.shape[1]
    group = heads // kv_heads
    gathered = pages.view(-1, pages.shape[3] * head_dim).index_select(0, tile.gather)
    keys, values = (
        plane[:, : tile.num_keys].unsqueeze(1).expand(kv_heads, group, tile.num_keys, head_dim)
        for plane in gathered.view(2, kv_heads, -1, head_dim)
    )
    by_kv_head = query.view(num_queries, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        by_kv_head,
        keys,
        values,
        attn_mask=tile.mask,
        is_causal=tile.is_causal,
        scale=scale,
    )
    return mixed.permute(2, 0, 1, 3).reshape(num_queries, heads * head_dim)
