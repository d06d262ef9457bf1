"""rms_norm and silu_mul in C."""

import ctypes
from collections.abc import Sequence
from typing import Final

import torch

from tokenmesh.kernels.native.start import library

DTYPES: Final = (torch.float32, torch.bfloat16)


def call(
    kernel: str, tensors: Sequence[torch.Tensor | None], sizes: Sequence[int], *numbers: float
) -> None:
    """Call a kernel, which takes its arguments in this order and last whether the first tensor is
    bfloat16."""
    first = tensors[0]
    assert first is not None
    getattr(library(), kernel)(
        *(ctypes.c_void_p(None if each is None else each.data_ptr()) for each in tensors),
        *map(ctypes.c_long, sizes),
        *map(ctypes.c_float, numbers),
        ctypes.c_int(first.dtype == torch.bfloat16),
    )


def fits(x: torch.Tensor, weight: torch.Tensor | None = None) -> bool:
    """Return whether the kernels know the dtype, and all rows have one weight, of float32."""
    is_one = weight is None or (weight.ndim == 1 and weight.dtype == torch.float32)
    return x.dtype in DTYPES and is_one


def native_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., F], weight float32 [F] -> a new tensor; see `fits`."""
    x, weight = x.contiguous(), weight.contiguous()
    out, width = torch.empty_like(x), len(weight)
    assert x.shape[-1] == width
    call("tm_norm", (x, weight, out), (x.numel() // width, width), eps)
    return out


def native_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2F] -> [T, F]; see `fits`."""
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    call("tm_silu_mul", (gate_up, out), (rows, width))
    return out
