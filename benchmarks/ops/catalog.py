"""Lists the ops that can be measured: those with work here, and on a GPU all others."""

import importlib
from collections.abc import Callable, Iterator
from typing import Final

import torch

from benchmarks.ops.attention import paged_attention_work
from benchmarks.ops.batch import Batch
from benchmarks.ops.elementwise import (
    gelu_mul_work,
    kv_write_work,
    rms_norm_work,
    rope_work,
    silu_mul_work,
)
from benchmarks.ops.linear import linear_work
from benchmarks.ops.moe import moe_work
from benchmarks.ops.quantized import moe_int4_work, quantized_linear_work
from benchmarks.ops.work import Dimensions, Work, size_of
from tests.kernels.case import KernelCase

MakeWork = Callable[[Batch, Dimensions, torch.dtype, torch.device], Work]

WORKS: Final[dict[str, MakeWork]] = {
    "gelu_mul": gelu_mul_work,
    "kv_write": kv_write_work,
    "linear": linear_work,
    "moe": moe_work,
    "moe_int4": moe_int4_work,
    "paged_attention": paged_attention_work,
    "quantized_linear": quantized_linear_work,
    "rms_norm": rms_norm_work,
    "rope": rope_work,
    "silu_mul": silu_mul_work,
}
"""Ops whose sizes follow from a batch."""
FOLDERS: Final = {"moe_int4": "moe"}
"""Folders of ops that have another name there, in tokenmesh/kernels."""


def case_works(op: str, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Work]]:
    """(name, work) of each case of a Triton op. Raises ModuleNotFoundError."""
    module = importlib.import_module(f"tests.kernels.cases.{op}")
    for case in module.cases():
        if dtype in case.tolerance:
            yield case.name, _work(case, dtype, device)


def _work(case: KernelCase, dtype: torch.dtype, device: torch.device) -> Work:
    generator = torch.Generator(device).manual_seed(0)
    inputs = case.make(dtype, device, generator)
    fresh = case.make(dtype, device, generator.manual_seed(0))

    def first(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return next(iter(outputs.values()))

    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    return Work(
        run=lambda: first(case.run(inputs)),
        reference=lambda: first(case.reference(fresh)),
        torch_way=None,
        num_bytes=size_of(*tensors),
        num_flops=0,
        tolerance=case.tolerance[dtype],
    )
