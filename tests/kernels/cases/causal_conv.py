"""Cases of causal_conv: inputs, and kernels to compile ahead of time."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from tests.kernels.case import Compilation, CompileLimits, Inputs, KernelCase, Outputs, normal
from tests.kernels.state_inputs import put_rows, rows_in, state_of
from tokenmesh.kernels.causal_conv import TOLERANCE, causal_conv_reference
from tokenmesh.kernels.causal_conv.triton import (
    BLOCK_C,
    NUM_WARPS,
    TOKENS,
    causal_conv,
    causal_conv_kernel,
)
from tokenmesh.kernels.state_rows import StateRows


@dataclass(frozen=True, slots=True)
class Case:
    """Shapes and parts of one case."""

    name: str
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    channels: int = 48
    width: int = 4
    kept: int = 4
    has_bias: bool = True
    activation: str | None = "silu"


CASES: Final = (
    Case("decode", lengths=(1, 1, 1), starts=(5, 0, 63), channels=272),
    Case("mixed", lengths=(3, 37, 1, 0, 16), starts=(15, 0, 2, 9, 33)),
    Case("least", lengths=(2, 5), starts=(0, 7), width=3, kept=2, has_bias=False, activation=None),
    Case("one-weight", lengths=(2,), starts=(1,), width=1, kept=0),
    Case("empty", lengths=(), starts=()),
)


def cases() -> list[KernelCase]:
    """All cases, run by a launcher with the causal_conv's arguments."""
    return [case_of(case) for case in CASES]


def case_of(case: Case) -> KernelCase:
    """One case."""
    return KernelCase(
        name=case.name,
        make=partial(_make, case),
        run=partial(_call, case, causal_conv),
        reference=partial(_call, case, causal_conv_reference),
        tolerance=TOLERANCE,
    )


def _make(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Inputs:
    wide = normal((sum(case.lengths), case.channels + 16), dtype, device, generator)
    inputs: Inputs = {
        "x": wide[:, : case.channels],
        "weight": normal((case.channels, case.width), dtype, device, generator),
        "bias": normal((case.channels,), dtype, device, generator) if case.has_bias else None,
    }
    put_rows(inputs, case.lengths, case.starts, device)
    shape = (case.channels, case.kept)
    inputs["state"] = state_of(case.starts, shape, dtype, device, generator)
    return inputs


def _call(case: Case, op: Callable[..., Any], a: Inputs) -> Outputs:
    rows: StateRows = rows_in(a, case.lengths)
    out = op(a["x"], a["weight"], a["bias"], a["state"], rows, case.activation)
    return {"out": out, "state": a["state"]}


def compilations() -> list[Compilation]:
    """Qwen3-Next's convolution: rows of one token, and prompts."""
    return [_compilation("decode", 1), _compilation("prefill", TOKENS)]


def _compilation(name: str, tokens: int) -> Compilation:
    pointers = ("x_ptr", "weight_ptr", "bias_ptr", "state_ptr", "out_ptr")
    numbers = ("slots_ptr", "cu_q_ptr", "starts_ptr")
    return Compilation(
        name=name,
        kernel=causal_conv_kernel,
        signature={
            **dict.fromkeys(pointers, "*bf16"),
            **dict.fromkeys(numbers, "*i32"),
            "slots_ptr": "*i64",
            "num_rows": "i32",
            "channels": "i32",
            "stride_x": "i32",
            "stride_weight": "i32",
        },
        constants={
            "stride_tap": 1,
            "WIDTH": 4,
            "KEPT": 4,
            "HAS_BIAS": True,
            "SILU": True,
            "TOKENS": tokens,
            "BLOCK_C": BLOCK_C,
            "BLOCK_K": 4,
        },
        divisible_by_16=(*pointers, *numbers, "channels", "stride_x"),
        num_warps=NUM_WARPS,
        limits=CompileLimits(max_registers=96, max_shared_bytes=4096),
    )
