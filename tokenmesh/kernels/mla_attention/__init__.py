"""mla_attention: attention over latents, the one compressed key and value that all heads share.

query    [tokens, heads, rank + rope_dim]    absorbed: q_nope @ W_uk, then the turned q_rope
pages    [blocks, page_size, elements of a row]    each token's latent, then its turned key; the new
         tokens are already written, see `latent_write`; in query's dtype or 8 bits, see
         `page_codes` (int8 on a CPU only)
rows     as for paged_attention: `prepare` makes it on the CPU; on a GPU it is a DeviceRows
rank     width of a latent
scale    what a logit is multiplied by, above 0
indices  [tokens, k] the positions that each token sees, -1 for none, each at most once and none
         after the token's own (sparse attention); on a CPU int64, on a GPU int32. None: all of them
page_scale  factor of stored latents, for pages of 8-bit floats
lse      [tokens, heads] float32 to be filled with the logarithm of each softmax's denominator; -inf
         for a token that sees nothing, whose result is zero
returns  [tokens, heads * rank], which the caller multiplies by W_uv

A caller that expands the keys and values of a long chunk and attends to those with paged_attention
gets the older ones by a row that ends before the chunk, its tokens one span: n tokens that begin at
position p are the row (p - n, n). Both are merged by their lse. Nothing that no token sees
reaches a result, NaN included.

On a GPU the page size must be a power of two, rank and rope_dim powers of two of at least 16, and
query's strides multiples of 16. Short rows go to a decode kernel that can be recorded in a graph.
"""

import torch

from tokenmesh.kernels.mla_attention.cpu import mla_attention as mla_attention_on_cpu
from tokenmesh.kernels.mla_attention.reference import TOLERANCE, mla_attention_reference
from tokenmesh.kernels.page_codes import encode, stored
from tokenmesh.kernels.paged_attention import DeviceRows, Prepared, Rows
from tokenmesh.kernels.paged_attention import prepare as prepare_pages

__all__ = [
    "TOLERANCE",
    "latent_write",
    "mla_attention",
    "mla_attention_reference",
    "prepare",
]


def prepare(rows: Rows, pages_shape: torch.Size, dtype: torch.dtype) -> Prepared:
    """The work of a step on the CPU, for all layers whose pages have that shape."""
    num_blocks, page_size, elements = pages_shape
    return prepare_pages(rows, torch.Size((1, num_blocks, 1, page_size, elements)), dtype, None)


def latent_write(
    latents: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, page_scale: float = 1.0
) -> None:
    """Write latents [T, rank + rope_dim] to slots [T] int64, block * page_size + offset."""
    rows = stored(encode(latents, pages.dtype, page_scale))
    stored(pages).view(-1, pages.shape[2]).index_copy_(0, slots, rows)


def mla_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    rows: Prepared | DeviceRows,
    rank: int,
    scale: float,
    indices: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    page_scale: float = 1.0,
) -> torch.Tensor:
    """The result is a new tensor."""
    if isinstance(rows, DeviceRows):
        from tokenmesh.kernels.mla_attention import triton

        return triton.mla_attention(query, pages, rows, rank, scale, indices, lse, page_scale)
    return mla_attention_on_cpu(query, pages, rows, rank, scale, indices, lse, page_scale)
