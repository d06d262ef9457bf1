"""sample: one token for each row of logits: temperature, min_p, top_k, top_p, then the draw.

The weights are w = exp((logit - best) / temperature). min_p keeps w >= min_p; top_k what is at
least the k-th largest; top_p the fewest largest whose sum reaches top_p of what the other two left.
Equal weights share one fate. The token is argmax(w / noise), `exponential_noise` of the row's
seed, the output position and the token id; temperature 0 is the first largest logit.

logits       [N, V]   float32, float16 or bfloat16; a row is contiguous; only read
idx_mapping  [N] int32  the state row of each row of logits; -1 is padding: token 0, no flaw
positions    [N] int64  output position of the token to draw
rows         ChoiceRows  parameters of all state rows
marks        [N] int32  what `logit_bias` overwrote, or None
returns      int64 [2, N]: tokens, then flaws (SOUND, NOT_FINITE, NOTHING_ALLOWED); the token of a
             row with a flaw is 0

Kept sets are exact: sums are made of whole numbers (weights in units of 2^-44) and so depend on
neither block nor order. Tokens are equal on every device but for what `exponential_noise` says.
`has_filters` False promises that no row has min_p, top_k or top_p, and saves two launches.
"""

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.sample.reference import sample_reference
from tokenmesh.kernels.sample.rows import (
    HID_DEFECT,
    HID_NUMBER,
    NOT_FINITE,
    NOTHING_ALLOWED,
    SOUND,
    ChoiceRows,
)

__all__ = [
    "HID_DEFECT",
    "HID_NUMBER",
    "NOTHING_ALLOWED",
    "NOT_FINITE",
    "SOUND",
    "ChoiceRows",
    "sample",
    "sample_reference",
]


def sample(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    rows: ChoiceRows,
    marks: torch.Tensor | None = None,
    has_filters: bool = True,
) -> torch.Tensor:
    """A new tensor [2, N]; nothing is waited for on a GPU."""
    if uses_triton(logits):
        from tokenmesh.kernels.sample import triton

        return triton.sample(logits, idx_mapping, positions, rows, marks, has_filters)
    return sample_reference(logits, idx_mapping, positions, rows, marks)
