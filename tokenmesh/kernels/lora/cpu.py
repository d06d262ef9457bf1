"""lora on the CPU: in C where the C kernels have been started, else two products an adapter."""

import ctypes

import torch

from tokenmesh.kernels.lora.weights import AdapterRows
from tokenmesh.kernels.native.start import has_started, library
from tokenmesh.kernels.native.weight import STEPS


def add_lora_on_cpu(x: torch.Tensor, out: torch.Tensor, number: int, rows: AdapterRows) -> None:
    """See the package; `number`: of the bank."""
    if has_started() and _fits(x, out):
        _add_in_c(x, out, number, rows)
    else:
        add_in_torch(x, out, number, rows)


def add_in_torch(x: torch.Tensor, out: torch.Tensor, number: int, rows: AdapterRows) -> None:
    for adapter, tokens in zip(rows.adapters, rows.indices, strict=True):
        for part in adapter.parts.get(number, ()):
            added = (x[tokens].to(part.a.dtype) @ part.a.t()) @ part.b
            columns = out[:, part.first : part.first + part.b.shape[1]]
            columns.index_add_(0, tokens, added.to(out.dtype))


def _fits(x: torch.Tensor, out: torch.Tensor) -> bool:
    return (
        x.dtype in STEPS
        and out.dtype in (x.dtype, torch.float32)
        and x.stride(1) == out.stride(1) == 1
    )


def _add_in_c(x: torch.Tensor, out: torch.Tensor, number: int, rows: AdapterRows) -> None:
    library().tm_lora(
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_long(x.stride(0)),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_long(out.stride(0)),
        ctypes.c_int(out.dtype == torch.float32),
        ctypes.c_long(x.shape[1]),
        ctypes.c_long(number),
        ctypes.c_void_p(rows.native.address),
        ctypes.c_int(x.dtype == torch.bfloat16),
    )
