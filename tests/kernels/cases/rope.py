"""Cases of rope: inputs, and kernels to compile ahead of time."""

import torch

from tests.kernels.case import (
    Compilation,
    CompileLimits,
    Inputs,
    KernelCase,
    Make,
    Outputs,
    normal,
)
from tokenmesh.kernels.rope import TOLERANCE, rope_reference
from tokenmesh.kernels.rope.triton import BLOCK_H, NUM_WARPS, rope_kernel, rotate


def cases() -> list[KernelCase]:
    """One pair, partial and odd rotary parts, more heads than a tile, nothing."""
    shapes = [(3, 1, 2, 1), (2, BLOCK_H + 3, 20, 3), (2, 3, 64, 32), (0, 2, 16, 8)]
    return [_case(*shape) for shape in shapes]


def _case(tokens: int, heads: int, head_dim: int, pairs: int) -> KernelCase:
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
            kernel=rope_kernel,
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
            limits=CompileLimits(max_registers=64, max_shared_bytes=512),
            required=(r"LDG\.E\.128", r"STG\.E\.128"),
        )
    ]


def random_turns(
    tokens: int, pairs: int, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """[T, 1, pairs] complex64 with lengths near 1, as attention scaling makes them."""
    drawn = torch.rand((2, tokens, 1, pairs), device=device, generator=generator)
    return torch.polar(drawn[0] + 0.5, 20 * drawn[1])
