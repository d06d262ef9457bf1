"""The specification of paged_attention: one query at a time, in float64."""

import torch

from tokenmesh.kernels.paged_attention.variant import PLAIN, Variant
from tokenmesh.kernels.paged_attention.work import Rows


def paged_attention_reference(
    query: torch.Tensor,
    pages: torch.Tensor,
    rows: Rows,
    scale: float,
    window: int | None,
    variant: Variant = PLAIN,
) -> torch.Tensor:
    """query [T, H, D] -> [T, H * D], rounded once to query's dtype."""
    return attention_and_lse_reference(query, pages, rows, scale, window, variant)[0]


def attention_and_lse_reference(
    query: torch.Tensor,
    pages: torch.Tensor,
    rows: Rows,
    scale: float,
    window: int | None,
    variant: Variant = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Also the logarithm of each softmax's denominator, float32 [T, H].

    A query at a negative position sees nothing: zeros, and the denominator is the sink's alone.
    """
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    page_size, group = pages.shape[3], query.shape[1] // pages.shape[2]
    token = 0
    for start, length, table in zip(rows.starts, rows.lengths, rows.tables, strict=True):
        for position in range(start, start + length):
            first = 0 if window is None else max(0, position - window + 1)
            seen = torch.arange(first, max(first, position + 1), device=query.device)
            keys, values = (
                plane[table[seen // page_size], :, seen % page_size]
                .double()
                .repeat_interleave(group, dim=1)
                for plane in pages
            )
            logits = torch.einsum("hd,shd->hs", query[token].double(), keys * variant.k_scale)
            logits *= scale
            if variant.softcap is not None:
                logits = variant.softcap * (logits / variant.softcap).tanh()
            log_sum = logits.logsumexp(-1)
            if variant.sinks is not None:
                log_sum = log_sum.logaddexp(variant.sinks.double())
            weights = (logits - log_sum.unsqueeze(-1)).exp()
            mixed = torch.einsum("hs,shd->hd", weights, values * variant.v_scale)
            out[token], lse[token] = mixed.to(query.dtype), log_sum.float()
            token += 1
    return out.flatten(1), lse
