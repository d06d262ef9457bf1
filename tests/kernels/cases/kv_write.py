"""Cases of kv_write: inputs, and kernels to compile ahead of time."""

import torch

from tests.kernels.case import Compilation, CompileLimits, Inputs, KernelCase, Outputs, normal
from tokenmesh.kernels.kv_write import TOLERANCE, kv_write_reference
from tokenmesh.kernels.kv_write.triton import BLOCK_H, NUM_WARPS, kv_write, kv_write_kernel


def cases() -> list[KernelCase]:
    """Heads over more than a tile, odd head sizes, 8-bit pages that saturate, nothing."""
    return [
        _case("5x1x16", 5, 1, 16),
        _case("3x5x48", 3, 5, 48),
        _case("fp8", 4, 2, 64, torch.float8_e4m3fn, (0.25, 2.0)),
        _case("fp8-e5m2", 4, 2, 16, torch.float8_e5m2, (0.25, 2.0)),
        _case("empty", 0, 2, 16),
    ]


def _case(
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
            limit = torch.finfo(pages_dtype).max
            wide = (limit / 3 * wide).clamp(-limit, limit).to(pages_dtype).to(dtype) * 2
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
    return [
        _compilation("bf16", "*bf16", 0.0),
        _compilation("fp8", "*fp8e4nv", 448.0),
        _compilation("fp8-e5m2", "*fp8e5", 57344.0),
    ]


def _compilation(name: str, pages_type: str, limit: float) -> Compilation:
    return Compilation(
        name=name,
        kernel=kv_write_kernel,
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
        limits=CompileLimits(max_registers=64),
        required=(r"LDG\.E\.128", r"STG\.E\.(128|64)"),
    )
