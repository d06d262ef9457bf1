"""Copying what a group of rows of one token reads into its scratch memory."""

import torch

from tokenmesh.kernels.page_codes import decode, stored
from tokenmesh.kernels.paged_attention.work import DecodeGroup


def gather(pages: torch.Tensor, group: DecodeGroup) -> None:
    """Fill `keys` and `values` of the group; what lies behind a row's last token becomes zero."""
    source = stored(pages).view(-1, group.gathered.shape[1])
    torch.index_select(source, 0, group.gather, out=group.gathered)
    if group.tails:
        # a masked key has the weight zero, which NaN times zero would not be
        torch._foreach_zero_(group.tails)
    if group.wide is not None:
        rows = group.gathered.view(pages.dtype).view(-1, pages.shape[-1])
        group.wide.copy_(decode(rows, group.wide.dtype).view(group.wide.shape))
