"""Rows on pages that are all over a pool of NaN."""

from collections.abc import Sequence
from typing import Final

import torch

from tokenmesh.kernels.paged_attention import Rows

BLOCKS: Final = 64


def scattered(starts: Sequence[int], lengths: Sequence[int], page_size: int) -> Rows:
    """Rows whose blocks are all over the pool."""
    order = (torch.randperm(BLOCKS - 1) + 1).tolist()
    counts = [-(-(s + n) // page_size) for s, n in zip(starts, lengths, strict=True)]
    tables = torch.zeros(len(starts), max(counts), dtype=torch.int64)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    return Rows(starts, lengths, tables)


def poisoned(pages: torch.Tensor, rows: Rows) -> torch.Tensor:
    """pages with NaN wherever no row has a token: free blocks, the null block, tails of rows."""
    page_size = pages.shape[3]
    seen = torch.zeros(BLOCKS, page_size, dtype=torch.bool)
    for start, length, table in zip(rows.starts, rows.lengths, rows.tables, strict=True):
        for position in range(start + length):
            seen[table[position // page_size], position % page_size] = True
    return torch.where(seen.view(1, BLOCKS, 1, -1, 1), pages.float(), torch.nan).to(pages.dtype)
