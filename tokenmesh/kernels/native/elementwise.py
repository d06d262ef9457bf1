"""rms_norm and silu_mul in C."""

import ctypes
from typing import Final

import torch

from tokenmesh.kernels.native.start import library

_DTYPES: Final = (torch.float32, torch.bfloat16)


def fits(x: torch.Tensor, weight: torch.Tensor | None = None) -> bool:
    """Whether the kernels know the dtype, and all rows have one weight, of float32."""
    is_one = weight is None or (weight.ndim == 1 and weight.dtype == torch.float32)
    return x.dtype in _DTYPES and is_one


def native_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., F], weight float32 [F] -> a new tensor; see `fits`."""
    x, weight = x.contiguous(), weight.contiguous()
    out, width = torch.empty_like(x), len(weight)
    assert x.shape[-1] == width
    library().tm_norm(
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_void_p(weight.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_long(x.numel() // width),
        ctypes.c_long(width),
        ctypes.c_float(eps),
        ctypes.c_int(x.dtype == torch.bfloat16),
    )
    return out


def native_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2F] -> [T, F]; see `fits`."""
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    library().tm_silu_mul(
        ctypes.c_void_p(gate_up.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_long(rows),
        ctypes.c_long(width),
        ctypes.c_int(gate_up.dtype == torch.bfloat16),
    )
    return out
