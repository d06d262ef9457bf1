"""Cases of moe: inputs, and kernels to compile ahead of time."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

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
from tests.kernels.cases.coded_experts import coded_cases
from tokenmesh.kernels.alignment import padded
from tokenmesh.kernels.moe.reference import experts_reference
from tokenmesh.kernels.moe.spec import ExpertsSpec
from tokenmesh.kernels.moe.triton import experts
from tokenmesh.kernels.moe.triton_align import count_kernel, place_kernel, start_kernel
from tokenmesh.kernels.moe.triton_products import first_kernel, second_kernel, sum_kernel
from tokenmesh.kernels.moe.triton_tiles import DEFAULT, Tile, Tiles, for_codes, read_tiles

Run = Callable[..., torch.Tensor]
_GPT_OSS: Final = ExpertsSpec(alpha=1.702, limit=1.5, up_offset=1.0)
_CASES: Final[Mapping[str, tuple[ExpertsSpec, bool, tuple[int, ...]]]] = {
    # tokens, experts of a token, experts, hidden, inner
    "few": (ExpertsSpec(), False, (3, 2, 5, 40, 72)),
    "many": (ExpertsSpec(), False, (45, 2, 3, 72, 37)),
    "everything": (_GPT_OSS, True, (7, 3, 4, 37, 65)),
    "limit-after": (
        replace(_GPT_OSS, alpha=1.0, limits_activated_gate=True),
        True,
        (5, 1, 3, 24, 9),
    ),
    "no-gate": (ExpertsSpec(activation="relu2", is_gated=False), True, (6, 2, 3, 33, 70)),
    "gelu": (ExpertsSpec(activation="gelu"), False, (4, 1, 2, 16, 16)),
    "gelu-tanh": (ExpertsSpec(activation="gelu_tanh", is_gated=False), False, (4, 1, 2, 16, 16)),
    "relu": (ExpertsSpec(activation="relu"), True, (4, 2, 2, 16, 16)),
    "nothing": (ExpertsSpec(), False, (0, 2, 3, 16, 16)),
}
TOLERANCE: Final = {torch.float32: 5e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Absolute tolerances for outputs of about 1 to 5."""


def cases() -> list[KernelCase]:
    """Every form, and ids that are not here, twice in a row, all the same."""
    cases = [_case(name, *case) for name, case in _CASES.items()]
    sizes = (9, 2, 4, 32, 32)
    return [
        *cases,
        *coded_cases(),
        _case("all-on-one", ExpertsSpec(), True, sizes, [[2, 2]] * 9),
        _case("nowhere", ExpertsSpec(), True, sizes, [[-1, 4], [4, 4], [-1, -1]] * 3),
    ]


def _case(
    name: str,
    spec: ExpertsSpec,
    has_bias: bool,
    sizes: tuple[int, ...],
    ids: list[list[int]] | None = None,
) -> KernelCase:
    def out_of(compute: Run) -> Callable[[Inputs], Outputs]:
        def call(a: Inputs) -> Outputs:
            own = replace(spec, b13=a["b13"], b2=a["b2"])
            names = ("x", "ids", "weights", "w13", "w2")
            return {"out": compute(*(a[name] for name in names), own)}

        return call

    make = _make(spec, has_bias, sizes, ids)
    return KernelCase(name, make, out_of(experts), out_of(experts_reference), TOLERANCE)


def _make(
    spec: ExpertsSpec, has_bias: bool, sizes: tuple[int, ...], ids: list[list[int]] | None
) -> Make:
    tokens, top_k, num_experts, hidden, inner = sizes
    rows = inner * (2 if spec.is_gated else 1)

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        def draw(*shape: int) -> torch.Tensor:
            """In padded rows."""
            wide = normal((*shape[:-1], padded(shape[-1])), dtype, device, generator)
            return wide[..., : shape[-1]]

        drawn = torch.rand((tokens, top_k), device=device, generator=generator)
        some = (drawn * (num_experts + 2)).floor().long() - 1
        b13, b2 = draw(num_experts, rows), draw(num_experts, hidden)
        return {
            "x": draw(tokens, hidden),
            "ids": some if ids is None else torch.tensor(ids, device=device),
            "weights": torch.rand((tokens, top_k), device=device, generator=generator),
            "w13": draw(num_experts, rows, hidden).mul_(hidden**-0.5),
            "w2": draw(num_experts, hidden, inner).mul_(inner**-0.5),
            "b13": b13 if has_bias else None,
            "b2": b2 if has_bias else None,
        }

    return make


@dataclass(frozen=True, slots=True)
class _Form:
    """The properties that make a product distinct."""

    is_gated: bool = True
    activation: str = "silu"
    limits: str = "nothing"
    has_bias: bool = False
    numbers: str = ""
    """Triton's type of codes; none: weights are plain."""
    group: int = 0
    has_offsets: bool = False
    has_table: bool = False
    scales: str = "*fp32"

    @property
    def absent(self) -> tuple[str, ...]:
        """Arguments of codes that are None."""
        is_there = {
            "scales_ptr": bool(self.numbers),
            "offsets_ptr": self.has_offsets,
            "table_ptr": self.has_table,
            "order_ptr": False,
        }
        return tuple(name for name, there in is_there.items() if not there)

    @property
    def constants(self) -> dict[str, Any]:
        return {"IS_NARROW": self.numbers == "*u8", "GROUP": self.group}


_TYPES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("x_ptr", "w13_ptr", "b13_ptr", "w2_ptr", "b2_ptr"), "*bf16"),
    **dict.fromkeys(
        ("ranks_ptr", "counts_ptr", "first_ptr", "block_ends_ptr", "pairs_ptr"), "*i32"
    ),
    **dict.fromkeys(("weights_ptr", "parts_ptr"), "*fp32"),
    **dict.fromkeys(("x_stride", "w_stride", "out_stride", "parts_stride", "hidden"), "i32"),
    **dict.fromkeys(("expert_stride", "inner", "num_experts", "num_pairs"), "i32"),
    **dict.fromkeys(("shift", "alpha", "limit", "up_offset"), "fp32"),
    **dict.fromkeys(("scales_ptr", "offsets_ptr", "table_ptr"), "*fp32"),
    "ids_ptr": "*i64",
    "out_ptr": "*bf16",
}
_EXPERTS: Final = 128
_ASYNC_COPY: Final = r"LDGSTS|UTMALDG"
_SHARED_BYTES: Final = 113 << 10
"""Two programs on a multiprocessor."""


def compilations() -> list[Compilation]:
    """128 experts in the tiles of any device, bfloat16; for many rows, on the warpgroup's unit."""
    few, many = read_tiles()[DEFAULT]
    gpt_oss = _Form(limits="gate", has_bias=True)
    no_gate = _Form(is_gated=False, activation="relu2", has_bias=True)
    return [
        _first("first-few", _Form(), few.block_m, few.first),
        _first("first-many", _Form(), many.block_m, many.first),
        _first("first-many-gpt-oss", gpt_oss, many.block_m, many.first),
        _first("first-many-no-gate", no_gate, many.block_m, many.first),
        _second("second-few", _Form(), few.block_m, few.second),
        _second("second-many", _Form(), many.block_m, many.second),
        *_coded(few, many),
        _other("count", count_kernel, {"BLOCK": 256}),
        _other("start", start_kernel, {"EXPERTS": _EXPERTS, "BLOCK_M": 64}),
        _other("place", place_kernel, {"BLOCK": 256}),
        replace(
            _other("sum", sum_kernel, {"TOP_K": 8, "BLOCK": 1024}),
            required=(r"LDG\.E\.128", r"STG\.E\.128"),
        ),
    ]


_MXFP4: Final = _Form(
    limits="gate", has_bias=True, numbers="*u8", group=32, has_table=True, scales="*bf16"
)
_CODED: Final[Mapping[str, _Form]] = {
    "mxfp4": _MXFP4,
    "awq": _Form(numbers="*u8", group=128, has_offsets=True),
    "int8": _Form(numbers="*i8"),
    "fp8": _Form(numbers="*fp8e4nv", group=128),
}


def _coded(few: Tiles, many: Tiles) -> list[Compilation]:
    """Every kind of codes in the first product, what takes most registers in the second."""
    height = many.block_m
    first, second = for_codes(many.first), for_codes(many.second)
    return [
        _first("first-few-mxfp4", _MXFP4, few.block_m, for_codes(few.first)),
        _second("second-few-mxfp4", _MXFP4, few.block_m, for_codes(few.second)),
        *(_first(f"first-many-{name}", form, height, first) for name, form in _CODED.items()),
        _second("second-many-mxfp4", _MXFP4, height, second),
        _second("second-many-awq", _CODED["awq"], height, second),
    ]


def _first(name: str, form: _Form, block_m: int, tile: Tile) -> Compilation:
    constants: dict[str, Any] = {
        "TOP_K": 8,
        "EXPERTS": _EXPERTS,
        "IS_GATED": form.is_gated,
        "ACTIVATION": form.activation,
        "LIMITS": form.limits,
    }
    absent: tuple[str, ...] = () if form.has_bias else ("b13_ptr",)
    constants |= form.constants
    compilation = _product(name, first_kernel, block_m, tile, constants, absent + form.absent)
    return _with_codes(compilation, form, "w13_ptr")


def _second(name: str, form: _Form, block_m: int, tile: Tile) -> Compilation:
    constants = {"EXPERTS": _EXPERTS, **form.constants}
    compilation = _product(name, second_kernel, block_m, tile, constants, ("b2_ptr", *form.absent))
    compilation = replace(compilation, signature={**compilation.signature, "out_ptr": "*fp32"})
    return _with_codes(compilation, form, "w2_ptr")


def _with_codes(compilation: Compilation, form: _Form, weights: str) -> Compilation:
    if not form.numbers:
        return compilation
    own = {weights: form.numbers, "scales_ptr": form.scales}
    return replace(compilation, signature={**compilation.signature, **own})


def _product(
    name: str,
    kernel: Any,
    block_m: int,
    tile: Tile,
    constants: Mapping[str, Any],
    absent: tuple[str, ...],
) -> Compilation:
    fields = asdict(tile)
    num_warps, num_stages = fields.pop("num_warps"), fields.pop("num_stages")
    compilation = _other(name, kernel, {**constants, **fields, "BLOCK_M": block_m}, absent)
    unit = r"HGMMA" if block_m >= 64 else r"HMMA"
    return replace(
        compilation,
        num_warps=num_warps,
        num_stages=num_stages,
        limits=CompileLimits(max_registers=168, max_shared_bytes=_SHARED_BYTES),
        required=(_ASYNC_COPY, unit),
    )


def _other(
    name: str, kernel: Any, constants: Mapping[str, Any], absent: tuple[str, ...] = ()
) -> Compilation:
    names = [each for each in kernel.arg_names if each not in constants and each not in absent]
    signature = {each: _TYPES[each] for each in names}
    return Compilation(
        name=name,
        kernel=kernel,
        signature=signature,
        constants={**constants, **dict.fromkeys(absent)},
        limits=CompileLimits(max_registers=64, max_shared_bytes=4096),
        divisible_by_16=tuple(
            each for each in names if _TYPES[each] != "fp32" and each not in ("num_pairs",)
        ),
    )
