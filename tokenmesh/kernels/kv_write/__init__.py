"""kv_write: store this step's keys and values into their pages.

pages  [2, blocks, kv_heads, page_size, elements of a row]   keys in pages[0], values in pages[1]
keys_values  [tokens, 2 * kv_heads, head_dim]       each token's key heads, then its value heads
slots        from `slot_rows`, once a step. On a CPU [tokens, 2 * kv_heads] rows of the pool; on a
             GPU [tokens] int64, block * page_size + offset. Slots of block 0, which no request
             owns, take what padding writes.

8-bit floats hold keys / k_scale and values / v_scale, saturated; int8 a factor for each head of a
token, on a CPU only: see `page_codes`.
"""

from typing import Final

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.kv_write.cpu import kv_write as kv_write_on_cpu
from tokenmesh.kernels.kv_write.cpu import slot_rows as slot_rows_on_cpu
from tokenmesh.kernels.kv_write.reference import kv_write_reference

TOLERANCE: Final = {torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0}

__all__ = ["TOLERANCE", "kv_write", "kv_write_reference", "slot_rows"]


def slot_rows(blocks: torch.Tensor, offsets: torch.Tensor, pages_shape: torch.Size) -> torch.Tensor:
    """blocks, offsets [T] int64 -> slots of one layer's pages."""
    if uses_triton(blocks):
        return blocks * pages_shape[3] + offsets
    return slot_rows_on_cpu(blocks, offsets, pages_shape)


def kv_write(
    keys_values: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write keys_values [T, 2 * kv_heads, D] to its slots."""
    if uses_triton(keys_values):
        from tokenmesh.kernels.kv_write import triton

        triton.kv_write(keys_values, pages, slots, k_scale, v_scale)
        return
    kv_write_on_cpu(keys_values, pages, slots, k_scale, v_scale)
