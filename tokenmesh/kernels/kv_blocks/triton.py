"""kv_blocks on a GPU: a program copies a piece of one block."""

from typing import Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.fusion import FUSED

BLOCK: Final = 4096
NUM_WARPS: Final = 4


def copy_out(
    pool: torch.Tensor, blocks: torch.Tensor, images: torch.Tensor, slots: torch.Tensor, first: int
) -> None:
    _launch(pool, blocks, images, slots, first, is_out=True)


def copy_in(
    pool: torch.Tensor, blocks: torch.Tensor, images: torch.Tensor, slots: torch.Tensor, first: int
) -> None:
    _launch(pool, blocks, images, slots, first, is_out=False)


def _launch(
    pool: torch.Tensor,
    blocks: torch.Tensor,
    images: torch.Tensor,
    slots: torch.Tensor,
    first: int,
    *,
    is_out: bool,
) -> None:
    pieces, num_blocks, piece_bytes = pool.shape
    assert pool.is_contiguous()
    assert images.is_contiguous()
    if len(blocks):
        kv_blocks_kernel[(len(blocks), pieces)](
            pool,
            images,
            blocks,
            slots,
            num_blocks * piece_bytes,
            images.shape[1],
            first,
            piece_bytes,
            IS_OUT=is_out,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            **FUSED,
        )


@triton.jit
def kv_blocks_kernel(
    pool_ptr,  # uint8 [pieces, blocks, piece_bytes]
    images_ptr,  # uint8 [slots, image_bytes]
    blocks_ptr,  # [n] int64
    slots_ptr,  # [n] int64
    plane_bytes,
    image_bytes,
    first,
    piece_bytes,
    IS_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    piece = tl.program_id(1).to(tl.int64)
    block, slot = tl.load(blocks_ptr + index), tl.load(slots_ptr + index)
    in_pool = pool_ptr + piece * plane_bytes + block * piece_bytes
    in_image = images_ptr + slot * image_bytes + first + piece * piece_bytes
    for start in range(0, piece_bytes, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < piece_bytes
        if IS_OUT:
            tl.store(in_image + offs, tl.load(in_pool + offs, mask=mask), mask=mask)
        else:
            tl.store(in_pool + offs, tl.load(in_image + offs, mask=mask), mask=mask)
