"""Paged attention on the CPU: gather pages, then grouped matmul (decode) or SDPA (prefill).

A page of one kv head is contiguous, so a gather is a list of memory copies and its result is
already [kv_heads, keys, head_dim]. SDPA with one bfloat16 query is six times slower than the two
matmuls over the whole group of query heads.
"""

import torch

from tokenmesh.kernels.paged_attention.work import DecodeGroup, PrefillTile, Prepared


def paged_attention(
    query: torch.Tensor, pages: torch.Tensor, prepared: Prepared, scale: float
) -> torch.Tensor:
    """query [T, H, D] -> [T, H * D]."""
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
    kv_heads, head_dim = pages.shape[2], pages.shape[4]
    num_rows, heads = query.shape[0], query.shape[1]
    gathered = pages.view(-1, pages.shape[3] * head_dim).index_select(0, group.gather)
    dtype = group.mask.dtype
    keys, values = gathered.to(dtype).view(2, num_rows * kv_heads, -1, head_dim)
    by_kv_head = query.to(dtype).reshape(num_rows * kv_heads, heads // kv_heads, head_dim)
    scores = torch.baddbmm(group.mask, by_kv_head, keys.transpose(1, 2), alpha=scale)
    mixed = torch.bmm(scores.softmax(-1), values)
    return mixed.view(num_rows, heads * head_dim).to(query.dtype)


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
        is_causal=tile.mask is None,
        scale=scale,
    )
    return mixed.permute(2, 0, 1, 3).reshape(num_queries, heads * head_dim)
