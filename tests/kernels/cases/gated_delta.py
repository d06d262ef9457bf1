"""Cases of gated_delta: inputs, and kernels to compile ahead of time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from tests.kernels.case import Compilation, CompileLimits, Inputs, KernelCase, Outputs, normal
from tests.kernels.state_inputs import put_rows, rows_in, state_of
from tokenmesh.kernels.gated_delta import TOLERANCE, gated_delta_reference
from tokenmesh.kernels.gated_delta.cpu import CHUNK
from tokenmesh.kernels.gated_delta.triton import gated_delta
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


@dataclass(frozen=True, slots=True)
class Case:
    """Shapes and parts of one case."""

    name: str
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    key_heads: int = 1
    heads: int = 2
    key_dim: int = 32
    value_dim: int = 32
    has_channels: bool = False
    scale: float | None = None
    use_qk_l2norm: bool = True


CASES: Final = (
    Case("decode", (1, 1, 1), (5, 0, 64), key_heads=2, heads=4, value_dim=48),
    Case("decode-channels", (1, 3), (9, 0), key_heads=2, has_channels=True),
    Case("mixed", (63, 1, 66, 0), (0, 7, 30, 3), key_dim=24, value_dim=40),
    Case("borders", (64, 65, 10), (64, 0, 60), key_heads=2, key_dim=16, scale=1.0),
    Case("channels", (70, 2), (63, 0), key_heads=2, key_dim=48, has_channels=True),
    Case("not-normalized", (12,), (1,), key_dim=16, use_qk_l2norm=False, scale=0.1),
    Case("empty", (), ()),
)


def cases() -> list[KernelCase]:
    """All cases, run by a launcher with the gated_delta's arguments."""
    return [case_of(case) for case in CASES]


def case_of(case: Case) -> KernelCase:
    """One case."""
    return KernelCase(
        name=case.name,
        make=partial(_make, case),
        run=partial(_call, case, gated_delta),
        reference=partial(_call, case, gated_delta_reference),
        tolerance=TOLERANCE,
    )


def _make(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Inputs:
    tokens, key_width = sum(case.lengths), case.key_heads * case.key_dim
    width = 2 * key_width + case.heads * case.value_dim
    wide = normal((tokens, width + 16), dtype, device, generator)
    gates = (tokens, case.heads, *([case.key_dim] if case.has_channels else []))
    drawn = torch.rand((tokens, case.heads), device=device, generator=generator)
    inputs: Inputs = {
        "q": wide[:, :key_width].view(tokens, case.key_heads, case.key_dim),
        "k": wide[:, key_width : 2 * key_width].view(tokens, case.key_heads, case.key_dim),
        "v": wide[:, 2 * key_width : width].view(tokens, case.heads, case.value_dim),
        "g": -2 * torch.rand(gates, device=device, generator=generator),
        "beta": (2 * drawn).to(dtype),
    }
    if not case.use_qk_l2norm:  # keys of about unit length, as without them states explode
        inputs["k"].mul_(case.key_dim**-0.5)
    put_rows(inputs, case.lengths, case.starts, device)
    shape = (case.heads, case.key_dim, case.value_dim)
    inputs["state"] = state_of(case.starts, shape, torch.float32, device, generator)
    return inputs


def _call(case: Case, op: Callable[..., Any], a: Inputs) -> Outputs:
    rows = rows_in(a, case.lengths)
    tensors = (a["q"], a["k"], a["v"], a["g"], a["beta"], a["state"])
    scale = case.key_dim**-0.5 if case.scale is None else case.scale
    out = op(*tensors, rows, scale, case.use_qk_l2norm)
    return {"out": out, "state": a["state"]}


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
            CompileLimits(max_registers=64, max_shared_bytes=4 << 10),
        ),
        _compilation(
            f"solve-{kind}",
            solve_kernel,
            channel,
            solve_constants(torch.bfloat16),
            SOLVE_LAUNCH,
            CompileLimits(max_registers=255, max_shared_bytes=96 << 10),
            (PRODUCT,),
        ),
        _compilation(
            f"scan-{kind}",
            scan_kernel,
            channel,
            scan_values,
            SCAN_LAUNCH,
            CompileLimits(255, max_shared_bytes=32 << 10, max_spills=32 if channel else 0),
            (PRODUCT,),
        ),
    ]


def _compilation(
    name: str,
    kernel: Any,
    channel: bool,
    constants: dict[str, Any],
    launch: dict[str, int],
    limits: CompileLimits,
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
