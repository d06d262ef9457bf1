"""sample on a GPU: its launches.

`race` finds the best logit of every block of the vocabulary and, for rows without filters, the
winner of the draw in it; `choose` (one program a row) joins the blocks. Four kernels between them
find the few tokens above which filters cannot reach, so that `choose` has the exact floor quickly.
"""

from typing import Final

import torch
import triton

from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.sample.rows import ChoiceRows
from tokenmesh.kernels.sample.triton_choose import choose_kernel
from tokenmesh.kernels.sample.triton_filters import (
    PIVOTS,
    gather_kernel,
    pick_kernel,
    start_kernel,
    survey_kernel,
)
from tokenmesh.kernels.sample.triton_race import race_kernel

BLOCK: Final = 1024
"""Tokens of one program; 149 programs for a row of 152k."""
CANDIDATES: Final = 2048
"""Tokens that may remain before a row is searched as a whole."""
MAX_VOCAB: Final = 1 << 19
CHOOSE_WARPS: Final = 8
"""So that all candidates stay in registers."""

_Candidates = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def sample(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    rows: ChoiceRows,
    marks: torch.Tensor | None,
    has_filters: bool,
    block: int = BLOCK,
    candidates: int = CANDIDATES,
) -> torch.Tensor:
    """See the package. Tests make `block` and `candidates` small to reach every path."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, "the logits of a row are not contiguous"
    assert vocab_size < MAX_VOCAB, "sums of weights would not fit into 63 bits"
    out = torch.empty(2, num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    grid = (num_rows, triton.cdiv(vocab_size, block))
    best = torch.empty(grid, dtype=torch.float32, device=logits.device)
    score, token = torch.empty_like(best), torch.empty_like(best, dtype=torch.int32)
    params = (rows.temperature, rows.min_p, rows.top_k, rows.top_p, rows.seed, positions)
    batch = (logits, logits.stride(0), idx_mapping)
    race_kernel[grid](*batch, *params, best, score, token, vocab_size, BLOCK=block, **FUSED)
    found: _Candidates | tuple[None, ...] = (None,) * 5
    if has_filters:
        found = _find_candidates(logits, idx_mapping, rows, best, block, candidates)
    choose_kernel[(num_rows,)](
        *batch,
        *params,
        marks,
        best,
        score,
        token,
        *found,
        out,
        vocab_size,
        grid[1],
        BLOCK=block,
        BLOCKS=triton.next_power_of_2(grid[1]),
        CANDIDATES=candidates,
        num_warps=CHOOSE_WARPS if has_filters else 4,
        **FUSED,
    )
    return out


def _find_candidates(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    rows: ChoiceRows,
    best: torch.Tensor,
    block: int,
    candidates: int,
) -> _Candidates:
    """pivot, num_above, total [N], weights and ids [N, candidates]."""
    num_rows, num_blocks = best.shape
    vocab_size = logits.shape[1]
    row_best = best.new_empty(num_rows)
    pivot = torch.empty_like(row_best, dtype=torch.int32)
    num_above = torch.empty_like(pivot)
    total = torch.empty_like(pivot, dtype=torch.int64)
    count = torch.empty(num_rows, PIVOTS, num_blocks, dtype=torch.int32, device=best.device)
    mass = torch.empty_like(count, dtype=torch.int64)
    first = torch.empty_like(best, dtype=torch.int32)
    weight = best.new_empty(num_rows, candidates)
    ids = torch.empty_like(weight, dtype=torch.int32)
    whole = {"BLOCKS": triton.next_power_of_2(num_blocks)}
    params = (rows.temperature, rows.min_p, rows.top_k, rows.top_p)
    start_kernel[(num_rows,)](
        idx_mapping,
        *params,
        best,
        row_best,
        pivot,
        vocab_size,
        num_blocks,
        **whole,
        **FUSED,
    )
    batch = (logits, logits.stride(0), idx_mapping, rows.temperature)
    survey_kernel[num_rows, num_blocks](
        *batch,
        row_best,
        pivot,
        count,
        mass,
        vocab_size,
        BLOCK=block,
        **FUSED,
    )
    pick_kernel[(num_rows,)](
        idx_mapping,
        rows.top_k,
        rows.top_p,
        count,
        mass,
        pivot,
        num_above,
        total,
        first,
        vocab_size,
        num_blocks,
        **whole,
        **FUSED,
    )
    gather_kernel[num_rows, num_blocks](
        *batch,
        best,
        row_best,
        pivot,
        num_above,
        first,
        weight,
        ids,
        vocab_size,
        CANDIDATES=candidates,
        BLOCK=block,
        **FUSED,
    )
    return pivot, num_above, total, weight, ids
