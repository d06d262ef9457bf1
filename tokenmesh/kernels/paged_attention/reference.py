"""The specification of paged_attention: one query at a time, in float64."""

import torch

from tokenmesh.kernels.paged_attention.work import Rows


def paged_attention_reference(
    query: torch.Tensor, pages: torch.Tensor, rows: Rows, scale: float, window: int | None
) -> torch.Tensor:
    """query [T, H, D] -> [T, H * D], rounded once to query's dtype."""
    out = torch.empty_like(query)
    page_size, group = pages.shape[3], query.shape[1] // pages.shape[2]
    token = 0
    for start, length, table in zip(rows.starts, rows.lengths, rows.tables.tolist(), strict=True):
        for position in range(start, start + length):
            first = 0 if window is None else max(0, position - window + 1)
            seen = range(first, position + 1)
            keys, values = (
                torch.stack([plane[table[p // page_size], :, p % page_size] for p in seen])
                .double()
                .repeat_interleave(group, dim=1)
                for plane in pages
            )
            scores = torch.einsum("hd,shd->hs", query[token].double(), keys) * scale
            mixed = torch.einsum("hs,shd->hd", scores.softmax(-1), values)
            out[token] = mixed.to(query.dtype)
            token += 1
    return out.flatten(1)
