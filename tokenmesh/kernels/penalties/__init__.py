"""penalties: repetition over prompt and output, presence and frequency over the output.

A token seen before: logit / repetition where the logit is above 0, logit * repetition elsewhere;
then minus frequency * count + presence for tokens that were generated.

logits       [N, V] float32, changed in place; a row is contiguous
idx_mapping  [N] int32  the state row of each row of logits; -1 is padding
rows         PenaltyRows

count_tokens counts drawn tokens [N] int64, but for rows with a flaw [N] int64; a state row may
stand in idx_mapping once.

The values are those of the reference, bit for bit: each operation is rounded by itself. Rows
without a slot cost one look at it.
"""

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.penalties.reference import count_tokens_reference, penalties_reference
from tokenmesh.kernels.penalties.rows import PenaltyRows

__all__ = [
    "PenaltyRows",
    "count_tokens",
    "count_tokens_reference",
    "penalties",
    "penalties_reference",
]


def penalties(logits: torch.Tensor, idx_mapping: torch.Tensor, rows: PenaltyRows) -> None:
    """Change the logits of rows that hold a slot."""
    if uses_triton(logits):
        from tokenmesh.kernels.penalties import triton

        return triton.penalties(logits, idx_mapping, rows)
    return penalties_reference(logits, idx_mapping, rows)


def count_tokens(
    tokens: torch.Tensor, flaws: torch.Tensor, idx_mapping: torch.Tensor, rows: PenaltyRows
) -> None:
    """Count one token for each row that holds a slot."""
    if uses_triton(tokens):
        from tokenmesh.kernels.penalties import triton

        return triton.count_tokens(tokens, flaws, idx_mapping, rows)
    return count_tokens_reference(tokens, flaws, idx_mapping, rows)
