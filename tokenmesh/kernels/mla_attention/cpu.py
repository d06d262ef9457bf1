"""mla_attention on the CPU: paged attention of one kv head whose values are part of its keys."""

import torch

from tokenmesh.kernels.page_codes import decode, is_coded, stored
from tokenmesh.kernels.paged_attention.cpu_variant import paged_attention
from tokenmesh.kernels.paged_attention.variant import Variant
from tokenmesh.kernels.paged_attention.work import SCRATCH_BYTES, Prepared, Rows


def mla_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    prepared: Prepared,
    rank: int,
    scale: float,
    indices: torch.Tensor | None,
    lse: torch.Tensor | None,
    page_scale: float = 1.0,
) -> torch.Tensor:
    """query [T, H, rank + rope_dim] -> [T, H * rank]; fills lse, if there is one."""
    if indices is None:
        one_head = pages.view(1, pages.shape[0], 1, *pages.shape[1:])
        variant = Variant(k_scale=page_scale, v_scale=page_scale, value_dim=rank)
        return paged_attention(query, one_head, prepared, scale, variant, lse)
    return _sparse(query, pages, prepared.rows, rank, scale, indices, lse, page_scale)


def _sparse(
    query: torch.Tensor,
    pages: torch.Tensor,
    rows: Rows,
    rank: int,
    scale: float,
    indices: torch.Tensor,
    lse: torch.Tensor | None,
    page_scale: float,
) -> torch.Tensor:
    """Each token gathers its own latents: as many tokens at a time as fit the scratch size."""
    tokens, heads, width = query.shape
    out = query.new_empty(tokens, heads * rank)
    slots = _slots(rows, indices, pages.shape[1])
    latents_of = stored(pages).view(-1, pages.shape[2])
    size = max(1, SCRATCH_BYTES // (indices.shape[1] * width * query.itemsize))
    for start in range(0, tokens, size):
        part = slice(start, start + size)
        latents = latents_of.index_select(0, slots[part].flatten())
        if is_coded(pages.dtype):
            latents = decode(latents.view(pages.dtype), query.dtype) * page_scale
        latents = latents.view(-1, indices.shape[1], width)
        hidden = (indices[part] < 0).unsqueeze(1)
        scores = torch.bmm(query[part], latents.transpose(1, 2)).float().mul_(scale)
        log_sums = scores.masked_fill_(hidden, float("-inf")).logsumexp(-1)
        # a token that sees nothing has -inf there, and its weights are to be zero
        weights = scores.sub_(log_sums.clamp_min(torch.finfo(torch.float32).min).unsqueeze(-1))
        mixed = torch.bmm(weights.exp_().to(latents.dtype), latents[..., :rank])
        out[part] = mixed.flatten(1)
        if lse is not None:
            lse[part] = log_sums
    return out


def _slots(rows: Rows, indices: torch.Tensor, page_size: int) -> torch.Tensor:
    """[T, k] where the positions lie in the pool; -1 at the row's first, which is written."""
    lengths = torch.tensor(rows.lengths)
    tables = rows.tables.repeat_interleave(lengths, dim=0)
    position = indices.clamp(min=0)
    return tables.gather(1, position // page_size) * page_size + position % page_size
