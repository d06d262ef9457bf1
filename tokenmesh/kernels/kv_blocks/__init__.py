"""kv_blocks: copy blocks of a KV pool to images of them, and back.

pool    uint8 [pieces, blocks, bytes]   contiguous; a block is one piece of each
blocks  int64 [n]
images  uint8 [slots, image bytes]      contiguous; an image holds a block's pieces in order
slots   int64 [n]                       all different
first   where in an image the pieces begin; what is before them and behind them is not touched
"""

from typing import Final

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.kv_blocks.cpu import copy_in as copy_in_on_cpu
from tokenmesh.kernels.kv_blocks.cpu import copy_out as copy_out_on_cpu
from tokenmesh.kernels.kv_blocks.reference import copy_in_reference, copy_out_reference

TOLERANCE: Final = {torch.float32: 0.0}

__all__ = ["TOLERANCE", "copy_in", "copy_in_reference", "copy_out", "copy_out_reference"]


def copy_out(
    pool: torch.Tensor,
    blocks: torch.Tensor,
    images: torch.Tensor,
    slots: torch.Tensor,
    first: int = 0,
) -> None:
    """Write the image of blocks[i] to slots[i]."""
    if uses_triton(pool):
        from tokenmesh.kernels.kv_blocks import triton

        triton.copy_out(pool, blocks, images, slots, first)
        return
    copy_out_on_cpu(pool, blocks, images, slots, first)


def copy_in(
    pool: torch.Tensor,
    blocks: torch.Tensor,
    images: torch.Tensor,
    slots: torch.Tensor,
    first: int = 0,
) -> None:
    """Write the image in slots[i] to blocks[i], which are all different."""
    if uses_triton(pool):
        from tokenmesh.kernels.kv_blocks import triton

        triton.copy_in(pool, blocks, images, slots, first)
        return
    copy_in_on_cpu(pool, blocks, images, slots, first)
