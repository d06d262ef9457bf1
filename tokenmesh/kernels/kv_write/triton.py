"""kv_write on a GPU: a program scatters some heads of one token."""

from typing import Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.alignment import assert_aligned_rows
from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.kv_write import TOLERANCE, kv_write_reference
from tokenmesh.kernels.specimen import Compilation, Inputs, KernelCase, Limits, Outputs, normal

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
        _kv_write_kernel[(tokens, triton.cdiv(heads, BLOCK_H))](
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
def _kv_write_kernel(
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


def specimens() -> list[KernelCase]:
    """Heads over more than a tile, odd head sizes, 8-bit pages that saturate, nothing."""
    return [
        _specimen("5x1x16", 5, 1, 16),
        _specimen("3x5x48", 3, 5, 48),
        _specimen("fp8", 4, 2, 64, torch.float8_e4m3fn, (0.25, 2.0)),
        _specimen("empty", 0, 2, 16),
    ]


def _specimen(
    name: str,
    tokens: int,
    kv_heads: int,
    head_dim: int,
    pages_dtype: torch.dtype | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> KernelCase:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        wide = normal((tokens, 2 * kv_heads + 1, 64), dtype, device, generator)
        if pages_dtype is not None:
            # The interpreter rounds to 8 bits wrongly: give it what needs no rounding.
            wide = (150 * wide).clamp(-448, 448).to(pages_dtype).to(dtype) * 2
        pages = normal((2, 4, kv_heads, 16, head_dim), torch.float32, device, generator)
        slots = torch.tensor([0, 63, 47, 17, 32], device=device)[:tokens]
        return {
            "keys_values": wide[:, 1:, :head_dim],
            "pages": pages.to(pages_dtype or dtype),
            "slots": slots,
        }

    def run(a: Inputs) -> Outputs:
        kv_write(a["keys_values"], a["pages"], a["slots"], *scales)
        return {"pages": a["pages"]}

    def reference(a: Inputs) -> Outputs:
        slots = [divmod(slot, 16) for slot in a["slots"].tolist()]
        kv_write_reference(a["keys_values"], a["pages"], slots, *scales)
        return {"pages": a["pages"]}

    return KernelCase(name, make, run, reference, TOLERANCE)


def compilations() -> list[Compilation]:
    """bfloat16 and 8-bit pages of 16 slots, as Llama 8B has them."""
    return [_compilation("bf16", "*bf16", 0.0), _compilation("fp8", "*fp8e4nv", 448.0)]


def _compilation(name: str, pages_type: str, limit: float) -> Compilation:
    return Compilation(
        name=name,
        kernel=_kv_write_kernel,
        signature={
            "keys_values_ptr": "*bf16",
            "pages_ptr": pages_type,
            "slots_ptr": "*i64",
            "stride_token": "i32",
            "stride_head": "i32",
            "stride_plane": "i64",
            "k_inverse_scale": "fp32",
            "v_inverse_scale": "fp32",
        },
        constants={
            "KV_HEADS": 8,
            "PAGE": 16,
            "D": 128,
            "LIMIT": limit,
            "BLOCK_H": BLOCK_H,
            "BLOCK_D": 128,
        },
        divisible_by_16=(
            "keys_values_ptr",
            "pages_ptr",
            "slots_ptr",
            "stride_token",
            "stride_head",
            "stride_plane",
        ),
        num_warps=NUM_WARPS,
        limits=Limits(max_registers=64),
        required=(r"LDG\.E\.128", r"STG\.E\.(128|64)"),
    )
