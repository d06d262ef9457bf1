"""grammar_mask: forbid what a grammar does not allow next, in place.

logits  [rows, vocab]              any float type; minus infinity where a bit is 0
rows    int32 [M]                  rows of the logits that have a grammar, each once
masks   int32 [M, ceil(vocab / 32)]   bit i of word w stands for token 32 * w + i; 1: allowed

Rows that are not named stay as they are, and no other row's logits are read or written.
"""

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.grammar_mask.cpu import grammar_mask as grammar_mask_on_cpu
from tokenmesh.kernels.grammar_mask.reference import grammar_mask_reference

__all__ = ["grammar_mask", "grammar_mask_reference"]


def grammar_mask(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Apply masks[m] to logits[rows[m]]."""
    if uses_triton(logits):
        from tokenmesh.kernels.grammar_mask import triton

        triton.grammar_mask(logits, rows, masks)
    else:
        grammar_mask_on_cpu(logits, rows, masks)
