"""The specification of mla_attention: one query at a time, in float64."""

from typing import Final

import torch

from tokenmesh.kernels.page_codes import decode
from tokenmesh.kernels.paged_attention.work import Rows

TOLERANCE: Final = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest absolute difference of an implementation from the reference, for values of size 1."""


def mla_attention_reference(
    query: torch.Tensor,
    pages: torch.Tensor,
    rows: Rows,
    rank: int,
    scale: float,
    indices: torch.Tensor | None = None,
    page_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [T, H, rank + rope_dim] -> [T, H * rank] in query's dtype, and the lse [T, H] float32.

    A query at a negative position sees nothing.
    """
    out = query.new_zeros(*query.shape[:2], rank)
    lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
    pages = decode(pages, torch.float32) if pages.dtype == torch.int8 else pages
    token = 0
    for start, length, table in zip(rows.starts, rows.lengths, rows.tables, strict=True):
        for position in range(start, start + length):
            seen = torch.arange(max(0, position + 1), device=query.device)
            if indices is not None:
                seen = indices[token][indices[token] >= 0].long()
            latents = pages[table[seen // pages.shape[1]], seen % pages.shape[1]].double()
            latents = latents * page_scale
            if len(latents) and position >= 0:
                logits = query[token].double() @ latents.T * scale
                out[token] = (logits.softmax(-1) @ latents[:, :rank]).to(query.dtype)
                lse[token] = logits.logsumexp(-1).float()
            token += 1
    return out.flatten(1), lse
