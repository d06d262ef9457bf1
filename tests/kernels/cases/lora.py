"""Cases of lora: inputs, and kernels to compile ahead of time."""

from typing import Any, Final

import torch

from tests.kernels.case import Compilation, CompileLimits, Inputs, KernelCase, Make, normal
from tokenmesh.kernels.alignment import padded
from tokenmesh.kernels.lora import TOLERANCE
from tokenmesh.kernels.lora.device import BLOCK_TOKENS, DeviceAdapterRows, DeviceBank, add_by_slot
from tokenmesh.kernels.lora.triton import (
    BLOCK_K,
    BLOCK_N,
    NUM_WARPS,
    expand_kernel,
    shrink_kernel,
)
from tokenmesh.kernels.lora.triton import add_by_slot as add_on_device

_ROWS: Final = ((1, 3), (None, 2), (0, 1), (2, 20), (1, 1), (None, 1), (3, 1))
"""The slot of each row, and its tokens: more than a tile, a slot twice, none."""
_SHAPES: Final = {
    "merged": (70, ((0, 40), (40, 24), (64, 24)), 16),
    "one": (BLOCK_K + 5, ((0, BLOCK_N + 3),), 48),
    "large rank": (32, ((0, 20),), 128),
}


def cases() -> list[KernelCase]:
    """Parts of merged layers, sizes that fill no tile, ranks of several blocks, no tokens."""
    made = [_case(name, *shape, _ROWS) for name, shape in _SHAPES.items()]
    return [*made, _case("nothing", *_SHAPES["one"], ((None, 3),))]


def _case(
    name: str, inputs: int, parts: Any, rank: int, rows: tuple[tuple[int | None, int], ...]
) -> KernelCase:
    def run(a: Inputs, add: Any) -> dict[str, torch.Tensor]:
        bank = DeviceBank(a["a"], a["b"], parts)
        add(a["x"], a["out"], bank, DeviceAdapterRows((bank,), a["tokens"], a["tiles"]))
        return {"out": a["out"]}

    return KernelCase(
        name=name,
        make=_inputs(inputs, parts, rank, rows),
        run=lambda a: run(a, add_on_device),
        reference=lambda a: {"out": run(_wide(a), add_by_slot)["out"].to(a["out"].dtype)},
        tolerance=TOLERANCE,
    )


def _wide(a: Inputs) -> Inputs:
    """In float64."""
    return {k: v.double() if v.is_floating_point() else v for k, v in a.items()}


def _inputs(inputs: int, parts: Any, rank: int, rows: tuple[tuple[int | None, int], ...]) -> Make:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        num_tokens = sum(count for _, count in rows)
        outputs = max(first + size for first, size in parts)
        tokens, tiles = DeviceAdapterRows.tiles_of(rows)

        def wide(*shape: int, scale: float = 1.0) -> torch.Tensor:
            full = normal((*shape[:-1], padded(shape[-1])), torch.float32, device, generator)
            return (full * scale).to(dtype)[..., : shape[-1]]

        return {
            "x": wide(num_tokens, inputs),
            "out": wide(num_tokens, outputs),
            "a": wide(4, len(parts) * rank, inputs, scale=inputs**-0.5),
            "b": wide(4, outputs, rank, scale=rank**-0.5),
            "tokens": torch.tensor(tokens, dtype=torch.int32, device=device),
            "tiles": torch.tensor(tiles, dtype=torch.int32, device=device).view(-1, 3),
        }

    return make


def compilations() -> list[Compilation]:
    """bfloat16, rank 16 and ranks of 64 and more."""
    return [
        each for rank in (16, 64) for each in (_shrink(f"{rank}", rank), _expand(f"{rank}", rank))
    ]


def _shrink(name: str, block: int) -> Compilation:
    pointers = {"x_ptr": "*bf16", "tokens_ptr": "*i32", "tiles_ptr": "*i32", "a_ptr": "*bf16"}
    strides = ("x_stride", "slot_stride", "a_stride", "out_stride")
    return Compilation(
        name=f"shrink-{name}",
        kernel=shrink_kernel,
        signature={
            **pointers,
            "out_ptr": "*bf16",
            **dict.fromkeys((*strides, "inputs"), "i32"),
        },
        constants={"BLOCK_M": BLOCK_TOKENS, "BLOCK_K": BLOCK_K, "BLOCK_R": block},
        divisible_by_16=("x_ptr", "a_ptr", "out_ptr", *strides, "inputs"),
        num_warps=NUM_WARPS,
        limits=CompileLimits(max_registers=168, max_shared_bytes=100_000),
        required=(r"HMMA",),
    )


def _expand(name: str, block: int) -> Compilation:
    pointers = {"x_ptr": "*bf16", "tokens_ptr": "*i32", "tiles_ptr": "*i32", "b_ptr": "*bf16"}
    strides = ("x_stride", "slot_stride", "b_stride", "out_stride")
    numbers = ("first_output", "outputs", "first_rank", "rank")
    return Compilation(
        name=f"expand-{name}",
        kernel=expand_kernel,
        signature={**pointers, "out_ptr": "*bf16", **dict.fromkeys((*strides, *numbers), "i32")},
        constants={"BLOCK_M": BLOCK_TOKENS, "BLOCK_N": BLOCK_N, "BLOCK_R": block},
        divisible_by_16=("x_ptr", "b_ptr", "out_ptr", *strides, *numbers),
        num_warps=NUM_WARPS,
        limits=CompileLimits(max_registers=168, max_shared_bytes=100_000),
        required=(r"HMMA",),
    )
