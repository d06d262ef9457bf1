"""The specification of kv_blocks: one piece after the other."""

import torch


def copy_out_reference(
    pool: torch.Tensor, blocks: torch.Tensor, images: torch.Tensor, slots: torch.Tensor, first: int
) -> None:
    size = pool.shape[2]
    for block, slot in zip(blocks.tolist(), slots.tolist(), strict=True):
        for piece in range(len(pool)):
            start = first + piece * size
            images[slot, start : start + size] = pool[piece, block]


def copy_in_reference(
    pool: torch.Tensor, blocks: torch.Tensor, images: torch.Tensor, slots: torch.Tensor, first: int
) -> None:
    size = pool.shape[2]
    for block, slot in zip(blocks.tolist(), slots.tolist(), strict=True):
        for piece in range(len(pool)):
            start = first + piece * size
            pool[piece, block] = images[slot, start : start + size]
