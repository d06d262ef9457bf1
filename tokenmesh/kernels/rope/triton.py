"""rope on a GPU: a program turns some heads of one token; pairs are neighbors in registers."""

from typing import Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.alignment import assert_aligned_rows
from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.rope import TOLERANCE, rope_reference
from tokenmesh.kernels.specimen import (
    Compilation,
    Inputs,
    KernelCase,
    Limits,
    Make,
    Outputs,
    normal,
)

BLOCK_H: Final = 8
NUM_WARPS: Final = 4


def rotate(x: torch.Tensor, turns: torch.Tensor) -> None:
    """x [T, H, D] in place, turns [T, 1, P] complex64; see the package."""
    tokens, heads, _ = x.shape
    assert_aligned_rows(x)
    if x.numel():
        _rope_kernel[(tokens, triton.cdiv(heads, BLOCK_H))](
            x,
            torch.view_as_real(turns),
            heads,
            x.stride(0),
            x.stride(1),
            ROTARY=2 * turns.shape[-1],
            BLOCK_H=BLOCK_H,
            BLOCK_R=triton.next_power_of_2(2 * turns.shape[-1]),
            num_warps=NUM_WARPS,
            **FUSED,
        )


@triton.jit
def load_turns(turns_ptr, token, ROTARY: tl.constexpr, BLOCK: tl.constexpr):
    """cos and sin [BLOCK / 2] of one token; past ROTARY they turn nothing."""
    offs = tl.arange(0, BLOCK)
    turns = tl.load(turns_ptr + token * ROTARY + offs, mask=offs < ROTARY, other=0.0)
    turns = tl.where((offs >= ROTARY) & (offs % 2 == 0), 1.0, turns)
    return tl.split(tl.reshape(turns, [BLOCK // 2, 2]))


@triton.jit
def turned(x, cos, sin, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr):
    """x [BLOCK_H, BLOCK] with each pair (2i, 2i + 1) turned by cos, sin [BLOCK / 2]."""
    even, odd = tl.split(tl.reshape(x, [BLOCK_H, BLOCK // 2, 2]))
    cos, sin = cos[None, :], sin[None, :]
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), [BLOCK_H, BLOCK])


@triton.jit
def _rope_kernel(
    x_ptr,  # [T, heads, >= ROTARY], read and written
    turns_ptr,  # [T, ROTARY]: real and imaginary parts in turn
    heads,
    stride_x,
    stride_head,
    ROTARY: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs = tl.arange(0, BLOCK_R)
    mask = (head < heads)[:, None] & (offs < ROTARY)[None, :]
    ptrs = x_ptr + token * stride_x + head.to(tl.int64)[:, None] * stride_head + offs[None, :]
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    cos, sin = load_turns(turns_ptr, token, ROTARY, BLOCK_R)
    out = turned(x, cos, sin, BLOCK_H, BLOCK_R)
    tl.store(ptrs, out.to(x_ptr.dtype.element_ty), mask=mask)


def random_turns(
    tokens: int, pairs: int, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """[T, 1, pairs] complex64 with lengths near 1, as attention scaling makes them."""
    drawn = torch.rand((2, tokens, 1, pairs), device=device, generator=generator)
    return torch.polar(drawn[0] + 0.5, 20 * drawn[1])


def specimens() -> list[KernelCase]:
    """One pair, partial and odd rotary parts, more heads than a tile, nothing."""
    shapes = [(3, 1, 2, 1), (2, BLOCK_H + 3, 20, 3), (2, 3, 64, 32), (0, 2, 16, 8)]
    return [_specimen(*shape) for shape in shapes]


def _specimen(tokens: int, heads: int, head_dim: int, pairs: int) -> KernelCase:
    def run(a: Inputs) -> Outputs:
        rotate(a["x"], a["turns"])
        return {"x": a["x"]}

    return KernelCase(
        name=f"{tokens}x{heads}x{head_dim}-{pairs}",
        make=_make(tokens, heads, head_dim, pairs),
        run=run,
        reference=lambda a: {"x": rope_reference(a["x"], a["turns"])},
        tolerance={dtype: 4 * value for dtype, value in TOLERANCE.items()},
    )


def _make(tokens: int, heads: int, head_dim: int, pairs: int) -> Make:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        wide = normal((tokens, heads + 2, 64), dtype, device, generator)
        turns = random_turns(tokens, pairs, device, generator)
        return {"x": wide[:, :heads, :head_dim], "turns": turns}

    return make


def compilations() -> list[Compilation]:
    """Head size 128, all of it turned."""
    return [
        Compilation(
            name="128",
            kernel=_rope_kernel,
            signature={
                "x_ptr": "*bf16",
                "turns_ptr": "*fp32",
                "heads": "i32",
                "stride_x": "i32",
                "stride_head": "i32",
            },
            constants={"ROTARY": 128, "BLOCK_H": BLOCK_H, "BLOCK_R": 128},
            divisible_by_16=("x_ptr", "turns_ptr", "stride_x", "stride_head"),
            num_warps=NUM_WARPS,
            limits=Limits(max_registers=64, max_shared_bytes=512),
            required=(r"LDG\.E\.128", r"STG\.E\.128"),
        )
    ]
