"""logit_bias: allowed tokens, biases, stop tokens before min_tokens, and bad words, in this order.

logits       [N, V] float32, changed in place; a row is contiguous
idx_mapping  [N] int32  the state row of each row of logits; -1 is padding
positions    [N] int64  output position of the token to draw
rows         LimitRows
returns      marks, int32 [N]: what was overwritten with minus infinity and cannot be seen any more
             (HID_DEFECT, HID_NUMBER of `sample`)

record adds drawn tokens [N] int64 to `rows.recent`, but for rows with a flaw [N] int64.

The values are those of the reference, bit for bit. Rows without a slot cost one look at it.
"""

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.logit_bias.reference import logit_bias_reference, record_reference
from tokenmesh.kernels.logit_bias.rows import LimitRows

__all__ = ["LimitRows", "logit_bias", "logit_bias_reference", "record", "record_reference"]


def logit_bias(
    logits: torch.Tensor, idx_mapping: torch.Tensor, positions: torch.Tensor, rows: LimitRows
) -> torch.Tensor:
    """Marks, a new tensor [N]."""
    if uses_triton(logits):
        from tokenmesh.kernels.logit_bias import triton

        return triton.logit_bias(logits, idx_mapping, positions, rows)
    return logit_bias_reference(logits, idx_mapping, positions, rows)


def record(
    tokens: torch.Tensor, flaws: torch.Tensor, idx_mapping: torch.Tensor, rows: LimitRows
) -> None:
    """Shift the drawn tokens into `rows.recent`."""
    if uses_triton(tokens):
        from tokenmesh.kernels.logit_bias import triton

        return triton.record(tokens, flaws, idx_mapping, rows)
    return record_reference(tokens, flaws, idx_mapping, rows)
