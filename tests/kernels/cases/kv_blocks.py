"""Cases of kv_blocks: inputs, and kernels to compile ahead of time."""

from collections.abc import Callable

import torch

from tests.kernels.case import Compilation, CompileLimits, Inputs, KernelCase, Outputs
from tokenmesh.kernels.kv_blocks import TOLERANCE, copy_in_reference, copy_out_reference
from tokenmesh.kernels.kv_blocks.triton import (
    BLOCK,
    NUM_WARPS,
    copy_in,
    copy_out,
    kv_blocks_kernel,
)

Copy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], None]


def cases() -> list[KernelCase]:
    """Pieces of more than a tile and of odd sizes, a part of an image, no block at all."""
    return [
        case
        for name, copy, reference, written in (
            ("out", copy_out, copy_out_reference, "images"),
            ("in", copy_in, copy_in_reference, "pool"),
        )
        for case in (
            _case(f"{name}-large", copy, reference, written, 3, BLOCK + 48, [4, 0, 2], 0),
            _case(f"{name}-odd", copy, reference, written, 2, 37, [1, 3], 11),
            _case(f"{name}-none", copy, reference, written, 2, 16, [], 0),
        )
    ]


def _case(
    name: str,
    copy: Copy,
    reference: Copy,
    written: str,
    pieces: int,
    size: int,
    blocks: list[int],
    first: int,
) -> KernelCase:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        pool = torch.empty(pieces, 5, size, dtype=torch.uint8, device=device)
        images = torch.empty(4, first + pieces * size + 5, dtype=torch.uint8, device=device)
        return {
            "pool": pool.random_(0, 256, generator=generator),
            "blocks": torch.tensor(blocks, dtype=torch.int64, device=device),
            "images": images.random_(0, 256, generator=generator),
            "slots": torch.tensor([3, 0, 2][: len(blocks)], dtype=torch.int64, device=device),
        }

    def run(a: Inputs) -> Outputs:
        copy(a["pool"], a["blocks"], a["images"], a["slots"], first)
        return {written: a[written]}

    def expect(a: Inputs) -> Outputs:
        reference(a["pool"], a["blocks"], a["images"], a["slots"], first)
        return {written: a[written]}

    return KernelCase(name, make, run, expect, TOLERANCE)


def compilations() -> list[Compilation]:
    """Both ways, with pieces of a multiple of 16 bytes, as all but tiny models have them."""
    return [_compilation("out", is_out=True), _compilation("in", is_out=False)]


def _compilation(name: str, *, is_out: bool) -> Compilation:
    return Compilation(
        name=name,
        kernel=kv_blocks_kernel,
        signature={
            "pool_ptr": "*u8",
            "images_ptr": "*u8",
            "blocks_ptr": "*i64",
            "slots_ptr": "*i64",
            "plane_bytes": "i64",
            "image_bytes": "i32",
            "first": "i32",
            "piece_bytes": "i32",
        },
        constants={"IS_OUT": is_out, "BLOCK": BLOCK},
        divisible_by_16=(
            "pool_ptr",
            "images_ptr",
            "blocks_ptr",
            "slots_ptr",
            "plane_bytes",
            "image_bytes",
            "first",
            "piece_bytes",
        ),
        num_warps=NUM_WARPS,
        limits=CompileLimits(max_registers=64),
        required=(r"LDG\.E\.128", r"STG\.E\.128"),
    )
