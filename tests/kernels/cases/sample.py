"""Cases of sample: inputs, and kernels to compile ahead of time."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from tests.kernels.case import Compilation, CompileLimits, Inputs, KernelCase, Outputs
from tokenmesh.kernels.sample.reference import sample_reference
from tokenmesh.kernels.sample.rows import HID_DEFECT, HID_NUMBER, ChoiceRows
from tokenmesh.kernels.sample.triton import BLOCK, CANDIDATES, CHOOSE_WARPS, sample
from tokenmesh.kernels.sample.triton_choose import choose_kernel
from tokenmesh.kernels.sample.triton_filters import (
    gather_kernel,
    pick_kernel,
    start_kernel,
    survey_kernel,
)
from tokenmesh.kernels.sample.triton_race import race_kernel

_EQUAL: Final = {torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0}
_Row = tuple[float, float, int, float]
"""temperature, min_p, top_k, top_p"""

_PLAIN: Final[Sequence[_Row]] = [(0.0, 0.0, 0, 1.0), (1.0, 0.0, 0, 1.0), (0.3, 0.0, 999, 1.0)]
_FILTERED: Final[Sequence[_Row]] = [
    *_PLAIN,
    (1.0, 0.0, 7, 1.0),
    (1.7, 0.1, 0, 1.0),
    (1.0, 0.0, 0, 0.8),
    (0.7, 0.01, 30, 0.9),
    (3.0, 0.0, 0, 0.95),
    (1.0, 1.0, 1, 1e-9),
    (0.0, 0.5, 3, 0.5),
]

_NESTED: Final[_Row] = (3.0, 0.0, 30, 0.5)
"""Half of what top_k leaves is far less than half of everything."""


def cases() -> list[KernelCase]:
    """One block and several, few and too many candidates, equal logits, every kind of flaw."""
    return [
        _case("plain", _PLAIN, 301, block=128),
        _case("plain-one-block", _PLAIN, 50, block=64),
        _case("filters", _FILTERED, 301, block=128, candidates=512),
        _case("filters-whole-row", _FILTERED, 301, block=128, candidates=2),
        _case("nucleus-of-top-k-whole-row", [_NESTED] * 5, 130, block=128, candidates=2),
        _case("filters-even-logits", _FILTERED, 130, block=128, candidates=64, step=1.5),
        _case("flaws", _FILTERED[:6], 70, block=64, spoil=True),
        _case("nothing", [], 70, block=64),
    ]


def _case(
    name: str,
    params: Sequence[_Row],
    vocab_size: int,
    block: int,
    candidates: int = 16,
    step: float = 0.0,
    spoil: bool = False,
) -> KernelCase:
    """`step` rounds the logits to its multiples; `spoil` adds rows with nothing to draw."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        num_rows = len(params)
        wide = torch.randn(num_rows, vocab_size + 16, generator=generator, device=device) * 3
        wide = (wide / step).round() * step if step else wide
        logits = wide.to(dtype)[:, :vocab_size]
        marks = torch.zeros(num_rows, dtype=torch.int32, device=device)
        if spoil:
            _spoil(logits, marks)
        order = torch.randperm(num_rows, generator=generator, device=device)
        idx_mapping = order.int()
        if num_rows > 3:
            idx_mapping[2] = -1
        positions = torch.arange(num_rows, device=device) * 1000
        inputs: Inputs = {"logits": logits, "idx_mapping": idx_mapping, "positions": positions}
        return inputs | _columns(params, device) | {"marks": marks}

    def run(a: Inputs) -> Outputs:
        rows = _rows_of(a)
        has_filters = params is not _PLAIN
        arguments = (a["logits"], a["idx_mapping"], a["positions"], rows, a["marks"])
        return {"out": sample(*arguments, has_filters, block, candidates)}

    def reference(a: Inputs) -> Outputs:
        rows = _rows_of(a)
        arguments = (a["logits"], a["idx_mapping"], a["positions"], rows, a["marks"])
        return {"out": sample_reference(*arguments)}

    return KernelCase(name, make, run, reference, _EQUAL)


def _spoil(logits: torch.Tensor, marks: torch.Tensor) -> None:
    logits[0, 69] = float("nan")
    logits[1, 3] = float("inf")
    logits[3:5] = float("-inf")
    marks[4] = HID_NUMBER
    marks[5] = HID_DEFECT


def _columns(params: Sequence[_Row], device: torch.device) -> Inputs:
    temperature, min_p, top_k, top_p = zip(*params, strict=True) if params else ((),) * 4
    return {
        "temperature": torch.tensor(temperature, device=device, dtype=torch.float32),
        "min_p": torch.tensor(min_p, device=device, dtype=torch.float32),
        "top_k": torch.tensor(top_k, device=device, dtype=torch.int32),
        "top_p": torch.tensor(top_p, device=device, dtype=torch.float64),
        "seed": torch.arange(len(params), device=device) - 3,
    }


def _rows_of(a: Inputs) -> ChoiceRows:
    return ChoiceRows(a["temperature"], a["min_p"], a["top_k"], a["top_p"], a["seed"])


_TYPES: Final[Mapping[str, str]] = {
    "logits_ptr": "*bf16",
    "stride_n": "i32",
    "idx_mapping_ptr": "*i32",
    "temperature_ptr": "*fp32",
    "min_p_ptr": "*fp32",
    "top_k_ptr": "*i32",
    "top_p_ptr": "*fp64",
    "seed_ptr": "*i64",
    "positions_ptr": "*i64",
    "marks_ptr": "*i32",
    "best_ptr": "*fp32",
    "score_ptr": "*fp32",
    "token_ptr": "*i32",
    "row_best_ptr": "*fp32",
    "pivot_ptr": "*i32",
    "num_above_ptr": "*i32",
    "total_ptr": "*i64",
    "first_ptr": "*i32",
    "count_ptr": "*i32",
    "mass_ptr": "*i64",
    "weight_ptr": "*fp32",
    "id_ptr": "*i32",
    "out_ptr": "*i64",
    "vocab_size": "i32",
    "num_blocks": "i32",
}
_ABSENT: Final = ("pivot_ptr", "num_above_ptr", "total_ptr", "weight_ptr", "id_ptr", "marks_ptr")
_SIZES: Final = {"BLOCK": BLOCK, "BLOCKS": 256, "CANDIDATES": CANDIDATES}


def compilations() -> list[Compilation]:
    """A vocabulary of 152k, bfloat16 logits in rows of padded stride."""
    wide = (r"LDG\.E\.128",)
    return [
        _compilation("race", race_kernel, CompileLimits(64, 2048), required=wide),
        _compilation("survey", survey_kernel, CompileLimits(80, 1024), required=wide),
        _compilation("start", start_kernel, CompileLimits(64, 1024)),
        _compilation("pick", pick_kernel, CompileLimits(64, 1024)),
        _compilation("gather", gather_kernel, CompileLimits(96, 9000)),
        _compilation("choose", choose_kernel, CompileLimits(96, 1024), num_warps=CHOOSE_WARPS),
        _compilation("join", choose_kernel, CompileLimits(64, 1024), has_filters=False),
    ]


def _compilation(
    name: str,
    kernel: Any,
    limits: CompileLimits,
    num_warps: int = 4,
    has_filters: bool = True,
    required: tuple[str, ...] = (),
) -> Compilation:
    absent = () if has_filters else _ABSENT
    constants = {k: v for k, v in _SIZES.items() if k in kernel.arg_names}
    signature = {k: v for k, v in _TYPES.items() if k in kernel.arg_names and k not in absent}
    return Compilation(
        name=name,
        kernel=kernel,
        signature=signature,
        constants=constants | dict.fromkeys(absent),
        limits=limits,
        divisible_by_16=tuple(
            k for k in signature if k.endswith("_ptr") or k in ("stride_n", "vocab_size")
        ),
        num_warps=num_warps,
        required=required,
    )
