"""The specification of paged_attention: one query at a time, in float64."""

from typing import Final

import torch

from tokenmesh.kernels.page_codes import decode
from tokenmesh.kernels.paged_attention.variant import PLAIN, Variant
from tokenmesh.kernels.paged_attention.work import Rows

TOLERANCE: Final = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest absolute difference of an implementation from the reference, for values of size 1."""


def paged_attention_reference(
    query: torch.Tensor,
    pages: torch.Tensor,
    rows: Rows,
    scale: float,
    window: int | None,
    variant: Variant = PLAIN,
) -> torch.Tensor:
    """query [T, H, D] -> [T, H * value_dim], rounded once to query's dtype."""
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
    value_dim = variant.value_dim or query.shape[2]
    out = query.new_empty(*query.shape[:2], value_dim)
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    page_size, group = pages.shape[3], query.shape[1] // pages.shape[2]
    pages = decode(pages, torch.float32) if pages.dtype == torch.int8 else pages
    token = 0
    for start, length, table in zip(rows.starts, rows.lengths, rows.tables, strict=True):
        for position in range(start, start + length):
            first, end = _seen(rows, token, position, window)
            seen = torch.arange(first, max(first, end), device=query.device)
            keys, values = (
                plane[table[seen // page_size], :, seen % page_size, :width]
                .double()
                .repeat_interleave(group, dim=1)
                for plane, width in zip(pages, (query.shape[2], value_dim), strict=True)
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


def _seen(rows: Rows, token: int, position: int, window: int | None) -> tuple[int, int]:
    """The first position that a token sees, and the one after the last."""
    first, end = 0, position + 1
    for span in rows.spans:
        if token in range(*span):
            end += span[1] - 1 - token
    if window is not None:
        first = max(0, position - window + 1)
        if rows.has_symmetric_window:
            end = min(end, position + window)
    return first, end
