"""kv_write on a GPU: a program scatters some heads of one token."""

from typing import Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.alignment import assert_aligned_rows
from tokenmesh.kernels.fusion import FUSED

BLOCK_H: Final = 8
NUM_WARPS: Final = 4


def kv_write(
    keys_values: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """keys_values [T, 2 * kv_heads, D], slots [T] int64; see the package."""
    tokens, heads, head_dim = keys_values.shape
    assert_aligned_rows(keys_values)
    if keys_values.numel():
        kv_write_kernel[(tokens, triton.cdiv(heads, BLOCK_H))](
            keys_values,
            pages,
            slots,
            keys_values.stride(0),
            keys_values.stride(1),
            pages.stride(0),
            1.0 / k_scale,
            1.0 / v_scale,
            **page_constants(pages),
            BLOCK_H=BLOCK_H,
            BLOCK_D=triton.next_power_of_2(head_dim),
            num_warps=NUM_WARPS,
            **FUSED,
        )


def page_constants(pages: torch.Tensor) -> dict[str, float]:
    """The constexpr arguments of `store_in_pages` for one layer's contiguous pages."""
    assert pages.is_contiguous()
    assert_aligned_rows(pages)
    _, _, kv_heads, page_size, head_dim = pages.shape
    limit = torch.finfo(pages.dtype).max if pages.dtype.itemsize == 1 else 0.0
    return {"KV_HEADS": kv_heads, "PAGE": page_size, "D": head_dim, "LIMIT": limit}


@triton.jit
def store_in_pages(
    x,  # [BLOCK_H, BLOCK_D] float32
    head,  # [BLOCK_H]: key heads from 0, value heads from KV_HEADS
    slot,  # int64
    offs,  # [BLOCK_D]
    mask,  # [BLOCK_H, BLOCK_D]
    pages_ptr,  # [2, blocks, KV_HEADS, PAGE, D] contiguous
    stride_plane,
    k_inverse_scale,
    v_inverse_scale,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Scale, saturate 8-bit formats at LIMIT and write; addresses are 64 bits wide."""
    is_value = head >= KV_HEADS
    x = x * tl.where(is_value, v_inverse_scale, k_inverse_scale)[:, None]
    if LIMIT > 0:
        x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
    # Products, not `where`: Triton then sees that rows start at multiples of 16 and widens stores.
    plane = is_value.to(tl.int64)
    page = slot // PAGE * KV_HEADS + head - plane * KV_HEADS
    start = plane * stride_plane + (page * PAGE + slot % PAGE) * D
    ptrs = pages_ptr + start[:, None] + offs[None, :]
    tl.store(ptrs, x.to(pages_ptr.dtype.element_ty), mask=mask)


@triton.jit
def kv_write_kernel(
    keys_values_ptr,  # [T, 2 * KV_HEADS, D]
    pages_ptr,  # [2, blocks, KV_HEADS, PAGE, D]
    slots_ptr,  # [T] int64
    stride_token,
    stride_head,
    stride_plane,
    k_inverse_scale,
    v_inverse_scale,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs = tl.arange(0, BLOCK_D)
    mask = (head < 2 * KV_HEADS)[:, None] & (offs < D)[None, :]
    start = token * stride_token + head * stride_head
    x = tl.load(keys_values_ptr + start[:, None] + offs[None, :], mask=mask, other=0.0)
    store_in_pages(
        x.to(tl.float32),
        head,
        tl.load(slots_ptr + token),
        offs,
        mask,
        pages_ptr,
        stride_plane,
        k_inverse_scale,
        v_inverse_scale,
        KV_HEADS,
        PAGE,
        D,
        LIMIT,
    )
