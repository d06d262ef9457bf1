"""merge_attention: two attentions of the same queries over different keys made into one.

first, second          [tokens, heads * head_dim]    contiguous, one dtype
first_lse, second_lse  [tokens, heads] float32       the logarithm of each softmax's denominator
returns                [tokens, heads * head_dim], and its own [tokens, heads] float32

Where an lse is -inf that side saw no key and its values count for nothing, NaN included; where both
are, the result is zero and -inf. A sink may have been given to one of the two only.
"""

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.merge_attention.reference import TOLERANCE, merge_attention_reference

__all__ = ["TOLERANCE", "merge_attention", "merge_attention_reference"]


def merge_attention(
    first: torch.Tensor,
    first_lse: torch.Tensor,
    second: torch.Tensor,
    second_lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two new tensors: the attention over all keys and its lse."""
    if uses_triton(first):
        from tokenmesh.kernels.merge_attention import triton

        return triton.merge_attention(first, first_lse, second, second_lse)
    return merge_attention_reference(first, first_lse, second, second_lse)
