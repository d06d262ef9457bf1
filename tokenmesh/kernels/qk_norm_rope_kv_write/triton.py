"""qk_norm_rope_kv_write on a GPU: a program takes some heads of one token through all of it."""

from typing import Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.alignment import assert_aligned_rows
from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.kv_write.triton import page_constants, store_in_pages
from tokenmesh.kernels.qk_norm_rope_kv_write.head_norm import HeadNorm
from tokenmesh.kernels.rope.triton import load_turns, turned

BLOCK_H: Final = 8
NUM_WARPS: Final = 4
NORM_BEFORE_ROPE: Final = tl.constexpr(1)
NORM_AFTER_ROPE: Final = tl.constexpr(2)


def qk_norm_rope_kv_write(
    qkv: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    turns: torch.Tensor | None,
    norm: HeadNorm | None,
    query_scale: torch.Tensor | None,
    k_scale: float,
    v_scale: float,
) -> torch.Tensor:
    """slots [T] int64; queries are written over themselves in qkv; see the package."""
    tokens, all_heads, head_dim = qkv.shape
    heads = all_heads - 2 * pages.shape[2]
    assert qkv.stride(1) == head_dim, "heads of a token are not next to each other"
    assert_aligned_rows(qkv)
    if qkv.numel():
        qk_norm_rope_kv_write_kernel[(tokens, triton.cdiv(all_heads, BLOCK_H))](
            qkv,
            pages,
            slots,
            None if turns is None else torch.view_as_real(turns),
            None if norm is None else norm.weight,
            query_scale,
            qkv.stride(0),
            pages.stride(0),
            0.0 if norm is None else norm.eps,
            1.0 / k_scale,
            1.0 / v_scale,
            HEADS=heads,
            NORM=_place_of(norm),
            ROTARY=0 if turns is None else 2 * turns.shape[-1],
            HAS_SCALE=query_scale is not None,
            **page_constants(pages),
            BLOCK_H=BLOCK_H,
            BLOCK_D=triton.next_power_of_2(head_dim),
            num_warps=NUM_WARPS,
            **FUSED,
        )
    return qkv[:, :heads]


def _place_of(norm: HeadNorm | None) -> int:
    if norm is None:
        return 0
    return int((NORM_AFTER_ROPE if norm.is_after_rope else NORM_BEFORE_ROPE).value)


@triton.jit
def _normalized(x, is_normed, weight_ptrs, mask, eps, D: tl.constexpr):
    """x [BLOCK_H, BLOCK_D] with the rows of `is_normed` normalized and weighted."""
    scale = tl.math.rsqrt(tl.sum(x * x, axis=1) / D + eps)
    weight = tl.load(weight_ptrs, mask=mask & is_normed[:, None], other=0.0)
    return tl.where(is_normed[:, None], x * scale[:, None] * weight, x)


@triton.jit
def qk_norm_rope_kv_write_kernel(
    qkv_ptr,  # [T, HEADS + 2 * KV_HEADS, D]; queries are read and written
    pages_ptr,  # [2, blocks, KV_HEADS, PAGE, D]
    slots_ptr,  # [T] int64
    turns_ptr,  # [T, ROTARY] float32: real and imaginary parts in turn; None: ROTARY is 0
    weight_ptr,  # [HEADS + KV_HEADS, D] float32; None: NORM is 0
    query_scale_ptr,  # [T] float32; None: HAS_SCALE is false
    stride_token,
    stride_plane,
    eps,
    k_inverse_scale,
    v_inverse_scale,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    HAS_SCALE: tl.constexpr,
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
    in_row = (head * D)[:, None] + offs[None, :]
    mask = (head < HEADS + 2 * KV_HEADS)[:, None] & (offs < D)[None, :]
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    ptrs = qkv_ptr + token * stride_token + in_row
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)

    if NORM == NORM_BEFORE_ROPE:
        x = _normalized(x, ~is_value, weight_ptr + in_row, mask, eps, D)
    if ROTARY > 0:
        cos, sin = load_turns(turns_ptr, token, ROTARY, BLOCK_D)
        x = tl.where(is_value[:, None], x, turned(x, cos, sin, BLOCK_H, BLOCK_D))
    if NORM == NORM_AFTER_ROPE:
        x = _normalized(x, ~is_value, weight_ptr + in_row, mask, eps, D)

    query = x
    if HAS_SCALE:
        query = x * tl.load(query_scale_ptr + token)
    tl.store(ptrs, query.to(qkv_ptr.dtype.element_ty), mask=mask & is_query[:, None])
    store_in_pages(
        x,
        head - HEADS,
        tl.load(slots_ptr + token),
        offs,
        mask & ~is_query[:, None],
        pages_ptr,
        stride_plane,
        k_inverse_scale,
        v_inverse_scale,
        KV_HEADS,
        PAGE,
        D,
        LIMIT,
    )
