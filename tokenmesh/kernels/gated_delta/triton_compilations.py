"""What gated_delta compiles to for Qwen3-Next: 16 key heads, 32 value heads of size 128."""

from dataclasses import replace
from typing import Any, Final

import torch

from tokenmesh.kernels.gated_delta.cpu import CHUNK
from tokenmesh.kernels.gated_delta.triton_chunk import scan_kernel, solve_kernel
from tokenmesh.kernels.gated_delta.triton_recurrent import recurrent_kernel
from tokenmesh.kernels.gated_delta.triton_tiles import (
    FEW,
    RECURRENT_LAUNCH,
    SCAN_LAUNCH,
    SOLVE_LAUNCH,
    block_k,
    recurrent_block_v,
    scan_block_v,
    solve_constants,
)
from tokenmesh.kernels.specimen import Compilation, Limits

DIM: Final = 128
TYPES: Final = {
    **dict.fromkeys(("q", "k", "v", "beta", "out"), "*bf16"),
    **dict.fromkeys(("g", "state", "inverses", "products"), "*fp32"),
    "slots": "*i64",
    **dict.fromkeys(("cu_q", "starts"), "*i32"),
    **dict.fromkeys(("num_rows", "stride_q", "stride_k", "stride_v"), "i32"),
    **dict.fromkeys(("stride_g", "stride_beta"), "i32"),
    "scale": "fp32",
}
PRODUCT: Final = r"HGMMA"


def compilations() -> list[Compilation]:
    """A decay of each head, and of each channel."""
    return [each for channel in (False, True) for each in _with(channel)]


def _with(channel: bool) -> list[Compilation]:
    kind = "channel" if channel else "head"
    values = {"DV": DIM, "BLOCK_V": recurrent_block_v(DIM)}
    scan_values = {"DV": DIM, "BLOCK_V": scan_block_v(DIM, channel), "CHUNK": CHUNK}
    return [
        _compilation(
            f"recurrent-{kind}",
            recurrent_kernel,
            channel,
            values,
            RECURRENT_LAUNCH,
            Limits(max_registers=64, max_shared_bytes=4 << 10),
        ),
        _compilation(
            f"solve-{kind}",
            solve_kernel,
            channel,
            solve_constants(torch.bfloat16),
            SOLVE_LAUNCH,
            Limits(max_registers=255, max_shared_bytes=96 << 10),
            (PRODUCT,),
        ),
        _compilation(
            f"scan-{kind}",
            scan_kernel,
            channel,
            scan_values,
            SCAN_LAUNCH,
            Limits(255, max_shared_bytes=32 << 10, max_spills=32 if channel else 0),
            (PRODUCT,),
        ),
    ]


def _compilation(
    name: str,
    kernel: Any,
    channel: bool,
    constants: dict[str, Any],
    launch: dict[str, int],
    limits: Limits,
    required: tuple[str, ...] = (),
) -> Compilation:
    signature = {key: value for key, value in TYPES.items() if key in kernel.arg_names}
    return Compilation(
        name=name,
        kernel=kernel,
        signature=signature,
        constants={
            "HK": 16,
            "HV": 32,
            "DK": DIM,
            "CHANNEL": channel,
            "NORM": True,
            "FEW": FEW,
            "BLOCK_K": block_k(DIM),
            **constants,
        },
        divisible_by_16=tuple(
            key for key, value in signature.items() if value[0] == "*" or key[:6] == "stride"
        ),
        limits=replace(limits, oldest_triton=(3, 9)),
        required=required,
        num_warps=launch["num_warps"],
        num_stages=launch["num_stages"],
    )
