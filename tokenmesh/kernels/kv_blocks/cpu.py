"""kv_blocks on a CPU: in C, else by torch's index operations."""

import torch

from tokenmesh.kernels.native.blocks import native_copy_blocks
from tokenmesh.kernels.native.start import has_started


def copy_out(
    pool: torch.Tensor, blocks: torch.Tensor, images: torch.Tensor, slots: torch.Tensor, first: int
) -> None:
    if has_started():
        native_copy_blocks(pool, blocks, images, slots, first, out=True)
        return
    _pieces_of(images, pool, first)[slots] = pool.index_select(1, blocks).transpose(0, 1)


def copy_in(
    pool: torch.Tensor, blocks: torch.Tensor, images: torch.Tensor, slots: torch.Tensor, first: int
) -> None:
    if has_started():
        native_copy_blocks(pool, blocks, images, slots, first, out=False)
        return
    pool.index_copy_(1, blocks, _pieces_of(images, pool, first)[slots].transpose(0, 1))


def _pieces_of(images: torch.Tensor, pool: torch.Tensor, first: int) -> torch.Tensor:
    """The images' part for these pieces [slots, pieces, bytes], a view."""
    num_pieces, _, size = pool.shape
    part = images[:, first : first + num_pieces * size]
    return part.view(len(images), num_pieces, size)
