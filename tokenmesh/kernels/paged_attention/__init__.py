"""paged_attention: causal attention of new tokens over keys and values that live in pages.

query    [tokens, heads, head_dim]    the rows' tokens one after the other
pages    [2, blocks, kv_heads, page_size, head_dim]    the new tokens are already written
rows     Rows: which tokens belong to which row, and each row's block table
returns  [tokens, heads * head_dim]

Query head h reads kv head h // (heads / kv_heads). With a window, position p sees the positions
q with p - window < q <= p. Every page a row may touch must hold finite numbers, its tail included:
what is masked is still multiplied by zero.
"""

from typing import Final

import torch

from tokenmesh.kernels.paged_attention.cpu import paged_attention
from tokenmesh.kernels.paged_attention.reference import paged_attention_reference
from tokenmesh.kernels.paged_attention.work import Prepared, Rows, prepare

TOLERANCE: Final = {torch.float32: 1e-5, torch.bfloat16: 3e-2}

__all__ = [
    "TOLERANCE",
    "Prepared",
    "Rows",
    "paged_attention",
    "paged_attention_reference",
    "prepare",
]
