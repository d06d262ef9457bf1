"""paged_attention: causal attention of new tokens over keys and values that live in pages.

query    [tokens, heads, head_dim]    the rows' tokens one after the other; may be a view of a
                                      wider buffer
pages    [2, blocks, kv_heads, page_size, elements of a row]    the new tokens are already
                                      written; in query's dtype or 8 bits, see `page_codes` (int8
                                      on a CPU only); as wide as the wider one where keys and
                                      values differ
rows     which tokens belong to which row, each row's block table, and the window: `prepare`
         makes it on the CPU; on a GPU it is a DeviceRows
scale    what a logit is multiplied by, above 0
variant  softcap, sinks, scales of 8-bit pages, width of values
lse      [tokens, heads] float32 to be filled with the logarithm of each softmax's denominator,
         sink included: attentions over different keys can be merged by it
returns  [tokens, heads * value_dim]

Query head h reads kv head h // (heads / kv_heads). With a window, position p sees the positions
q with p - window < q <= p. Tokens of a span see each other both ways, see `Rows`: with a window,
p still sees no q <= p - window. Nothing that no token sees reaches a result, NaN included.

Attention without pages, of encoders: pages of one token each, made of the step's keys and values
[tokens, kv_heads, head_dim] by `torch.stack((keys, values)).unsqueeze(3)`, with the tokens'
numbers as block tables, and a span for each row.

What the GPU runner prepares is one DeviceRows a step, see there; `for_window` gives its twin for
layers with another window. Decode alone is the case num_short == rows; it has no numbers that
depend on lengths, so it can be recorded in a graph. There the page size must be a power of two,
and head_dim and query's strides multiples of 16.
"""

import torch

from tokenmesh.kernels.paged_attention.cpu import paged_attention as paged_attention_on_cpu
from tokenmesh.kernels.paged_attention.device import DeviceRows, choose_splits
from tokenmesh.kernels.paged_attention.reference import (
    TOLERANCE,
    attention_and_lse_reference,
    paged_attention_reference,
)
from tokenmesh.kernels.paged_attention.variant import PLAIN, Variant, variant_of
from tokenmesh.kernels.paged_attention.work import Prepared, Rows, prepare, span_ends

__all__ = [
    "PLAIN",
    "TOLERANCE",
    "DeviceRows",
    "Prepared",
    "Rows",
    "Variant",
    "attention_and_lse_reference",
    "choose_splits",
    "paged_attention",
    "paged_attention_reference",
    "prepare",
    "span_ends",
    "variant_of",
]


def paged_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    rows: Prepared | DeviceRows,
    scale: float,
    variant: Variant = PLAIN,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """The result is a new tensor."""
    if isinstance(rows, DeviceRows):
        from tokenmesh.kernels.paged_attention import triton

        return triton.paged_attention(query, pages, rows, scale, variant, lse)
    return paged_attention_on_cpu(query, pages, rows, scale, variant, lse)
