"""rms_norm in C."""

import ctypes
from typing import Final

import torch

from tokenmesh.kernels.native.start import library

_DTYPES: Final = (torch.float32, torch.bfloat16)


def fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel knows the dtype, and all rows have one weight."""
    return x.dtype in _DTYPES and weight.ndim == 1 and weight.dtype == torch.float32


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
