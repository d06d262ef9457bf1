"""Cases of quantized_linear: inputs, and kernels to compile ahead of time."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import torch

from tests.kernels.case import Compilation, CompileLimits, Inputs, KernelCase, Make, normal
from tokenmesh.kernels.codes import Codes, Kind
from tokenmesh.kernels.quantized_linear import (
    TOLERANCE,
    DeviceCodes,
    quantized_linear_reference,
)
from tokenmesh.kernels.quantized_linear.device_codes import CHUNK, ROUNDED_GROUP
from tokenmesh.kernels.quantized_linear.triton import (
    BLOCK_N,
    NUM_STAGES,
    NUM_WARPS,
    block_m,
    codes_kernel,
    decode_kernel,
    quantized_linear,
    round_kernel,
)

E2M1: Final = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
"""Twice the numbers of FP4, plus 12."""


@dataclass(frozen=True, slots=True)
class Form:
    """A format and sizes."""

    tokens: int
    outputs: int
    inputs: int
    group: int
    bits: int = 4
    kind: Kind = "integers"
    center: int = 8
    table: tuple[int, ...] | None = None
    has_offsets: bool = False
    has_bias: bool = False
    has_order: bool = False
    is_wide: bool = False
    """The result is float32."""
    rounds_inputs: bool = False
    scales: torch.dtype = torch.float32
    """Whose numbers the scales are."""
    has_bytes: bool = False
    """E4M3 as a GPU has it that lacks the type."""


_CASES: Final[Mapping[str, Form]] = {
    "int4": Form(5, 80, 96, 32),
    "awq-many-tokens": Form(70, 48, 256, 128, has_offsets=True, has_bias=True),
    "gptq-act-order": Form(3, 32, 128, 64, has_offsets=True, has_order=True),
    "int4-channel": Form(1, 16, 80, 80, has_bias=True, is_wide=True),
    "int4-groups-of-16": Form(17, 64, 48, 16, scales=torch.float16),
    "nvfp4": Form(4, 96, 112, 16, kind="table", center=12, table=E2M1),
    "mxfp4": Form(
        *(9, 64, 160, 32),
        kind="table",
        center=12,
        table=E2M1,
        has_bias=True,
        scales=torch.bfloat16,
    ),
    "int8-channel": Form(4, 80, 96, 96, 8, center=128, has_bias=True, rounds_inputs=True),
    "int8-channel-weights": Form(4, 80, 96, 96, 8, center=128, has_bias=True),
    "gptq8": Form(20, 64, 128, 64, 8, center=128, has_offsets=True),
    "six-bits": Form(2, 32, 112, 16, 6, center=32),
    "fp8-block": Form(6, 48, 160, 128, 8, kind="e4m3", center=0, rounds_inputs=True),
    "fp8-block-weights": Form(6, 48, 160, 128, 8, kind="e4m3", center=0),
    "mxfp8": Form(2, 32, 64, 32, 8, kind="e4m3", center=0),
    "fp8-bytes": Form(6, 48, 160, 32, 8, kind="e4m3", center=0, has_bytes=True),
    "int8-many-tokens": Form(40, 32, 272, 272, 8, center=128, rounds_inputs=True),
    "fp8-channel": Form(
        3, 80, 144, 144, 8, kind="e4m3", center=0, has_bias=True, rounds_inputs=True
    ),
    "int8-nothing": Form(0, 32, 64, 64, 8, center=128, rounds_inputs=True),
    "nothing": Form(0, 32, 64, 32),
}


def cases() -> list[KernelCase]:
    """Every kind of codes, sizes that fill no tile, groups that end within one."""
    return [_case(name, form) for name, form in _CASES.items()]


def _case(name: str, form: Form) -> KernelCase:
    def run(a: Inputs, compute: Any) -> dict[str, torch.Tensor]:
        x = a.pop("x")
        out_dtype = torch.float32 if form.is_wide else x.dtype
        out = compute(x, DeviceCodes(**a), out_dtype)
        a["x"] = x
        return {"out": out}

    return KernelCase(
        name=name,
        make=_make(form),
        run=lambda a: run(a, quantized_linear),
        reference=lambda a: run(a, quantized_linear_reference),
        tolerance=TOLERANCE,
    )


def draw_codes(form: Form, device: torch.device, generator: torch.Generator) -> Codes:
    """Random codes of a weight whose products with standard normal numbers are about 1."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=device, generator=generator)

    shape = (form.outputs, form.inputs)
    if form.kind == "e4m3":
        numbers = normal(shape, torch.float8_e4m3fn, device, generator).view(torch.uint8)
    else:
        numbers = (draw(*shape) * (1 << form.bits)).to(torch.uint8)
    groups = -(-form.inputs // form.group)
    codes = Codes(
        numbers,
        form.bits,
        torch.ones(form.outputs, groups, device=device),
        form.group,
        kind=form.kind,
        center=form.center,
        table=form.table,
        rounds_inputs=form.rounds_inputs,
    )
    size = form.inputs**-0.5
    scales = (draw(form.outputs, groups) + 0.5) * size / codes.decoded().std()
    order = torch.randperm(form.inputs, device=device, generator=generator)
    return replace(
        codes,
        scales=scales.to(form.scales).float(),
        offsets=draw(form.outputs, groups) * size if form.has_offsets else None,
        order=order if form.has_order else None,
    )


def _make(form: Form) -> Make:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        codes = draw_codes(form, device, generator)
        bias = normal((form.outputs,), dtype, device, generator) if form.has_bias else None
        packed = DeviceCodes.pack(codes, bias)
        # rows are longer than what may be read of them
        x = normal((form.tokens, form.inputs + 16), dtype, device, generator)
        if form.kind == "e4m3":
            # the interpreter does not round to FP8 as a GPU does: numbers that need no rounding
            x = x.clamp(-3, 3).to(torch.float8_e4m3fn).to(dtype)
            x[:, ::ROUNDED_GROUP] = 3.5
        if form.has_bytes:
            packed = replace(packed, numbers=packed.numbers.view(torch.uint8))
        made = {each.name: getattr(packed, each.name) for each in fields(packed)}
        return {**made, "x": x[:, : form.inputs]}

    return make


_TYPES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("x_ptr", "bias_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("scales_ptr", "offsets_ptr", "table_ptr"), "*fp32"),
    **dict.fromkeys(("x_stride", "row_stride", "tokens", "outputs", "inputs"), "i32"),
    "numbers_ptr": "*u8",
    "shift": "fp32",
}


def compilations() -> list[Compilation]:
    """bfloat16 activations, few tokens and many."""
    return [
        _compilation("int4-few", 1, 128, absent=("offsets_ptr", "table_ptr", "bias_ptr")),
        _compilation("int4-many", 64, 128, absent=("offsets_ptr", "table_ptr", "bias_ptr")),
        _compilation("awq-few", 1, 32, absent=("table_ptr",)),
        _compilation("nvfp4-few", 1, 16, absent=("offsets_ptr", "bias_ptr")),
        _compilation("fp8-bytes", 1, 0, absent=("offsets_ptr", "table_ptr", "bias_ptr"), wide=True),
        _compilation("mxfp4-many", 64, 32, "*u8", ("offsets_ptr", "bias_ptr"), "*bf16"),
        _compilation("int8-few", 1, 0, "*i8", absent=("offsets_ptr", "table_ptr", "bias_ptr")),
        _compilation("fp8-many", 64, 128, "*fp8e4nv", ("offsets_ptr", "table_ptr", "bias_ptr")),
        _round("int8", False, 127.0),
        _round("fp8e4nv", True, 448.0),
        *(_codes(*each) for each in (("i8", 1), ("i8", 64), ("fp8e4nv", 1), ("fp8e4nv", 64))),
    ]


def _round(numbers: str, is_float: bool, limit: float) -> Compilation:
    numbers = "i8" if numbers == "int8" else numbers
    pointers = {"x_ptr": "*bf16", "out_ptr": f"*{numbers}", "factors_ptr": "*fp32"}
    return Compilation(
        name=f"round-{numbers}",
        kernel=round_kernel,
        signature={**pointers, **dict.fromkeys(("x_stride", "inputs", "groups"), "i32")},
        constants={"IS_FLOAT": is_float, "LIMIT": limit, "BLOCK": ROUNDED_GROUP},
        divisible_by_16=("x_ptr", "out_ptr", "factors_ptr", "x_stride", "inputs"),
        num_warps=1,
        limits=CompileLimits(max_registers=64, max_shared_bytes=4096),
    )


def _codes(numbers: str, tokens: int) -> Compilation:
    pointers = ("x_ptr", "factors_ptr", "numbers_ptr", "scales_ptr", "out_ptr")
    kinds = (f"*{numbers}", "*fp32", f"*{numbers}", "*fp32", "*bf16")
    sizes = ("x_groups", "tokens", "outputs", "inputs")
    return Compilation(
        name=f"codes-{numbers}-{tokens}",
        kernel=codes_kernel,
        signature={**dict(zip(pointers, kinds, strict=True)), **dict.fromkeys(sizes, "i32")},
        constants={
            "bias_ptr": None,
            "IS_FLOAT": numbers != "i8",
            "GROUP": 0,
            "BLOCK_M": block_m(tokens),
            "BLOCK_N": BLOCK_N,
            "BLOCK_K": ROUNDED_GROUP,
        },
        divisible_by_16=(*pointers, "outputs", "inputs"),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        limits=CompileLimits(max_registers=168, max_shared_bytes=100_000),
        required=(r"IMMA|IGMMA" if numbers == "i8" else r"QMMA|QGMMA|HMMA",),
    )


def _compilation(
    name: str,
    tokens: int,
    group: int,
    numbers: str = "*u8",
    absent: tuple[str, ...] = (),
    scales: str = "*fp32",
    wide: bool = False,
) -> Compilation:
    constants: dict[str, Any] = {
        "IS_NARROW": numbers == "*u8" and not wide,
        "GROUP": group,
        "BLOCK_M": block_m(tokens),
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": CHUNK,
        **dict.fromkeys(absent),
    }
    types = {**_TYPES, "numbers_ptr": numbers, "scales_ptr": scales}
    names = [each for each in decode_kernel.arg_names if each not in constants]
    return Compilation(
        name=name,
        kernel=decode_kernel,
        signature={each: types[each] for each in names},
        constants=constants,
        divisible_by_16=tuple(each for each in names if each not in ("shift", "tokens")),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        limits=CompileLimits(max_registers=168, max_shared_bytes=100_000),
        required=(r"HMMA|HGMMA",),
    )
