"""Computes attention within rows, layer norms and GELU of encoders in C."""

import ctypes
from typing import ClassVar, Final

import torch

from tokenmesh.kernels.native.elementwise import DTYPES, call
from tokenmesh.kernels.native.start import library

_LANES: Final = 16


class _Rows(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "firsts")),
        *(
            (f"{name}_{step}", ctypes.c_long)
            for name in ("query", "key", "value")
            for step in ("token", "head")
        ),
        *((name, ctypes.c_long) for name in ("rows", "heads", "kv_heads", "dim", "value_dim")),
        ("window", ctypes.c_long),
        ("scale", ctypes.c_float),
    ]


def fits_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether `native_row_attention` takes them: dtypes, head sizes and memory layouts."""
    return (
        query.dtype in DTYPES
        and query.dtype == key.dtype == value.dtype
        and not query.shape[3] % _LANES
        and not value.shape[3] % _LANES
        and all(each.stride(3) == 1 for each in (query, key, value))
    )


def native_row_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    firsts: torch.Tensor,
    window: int | None,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [1, H, T, D], key [1, K, T, D], value [1, K, T, V] -> [1, T, H, V]; see `fits_rows`.

    out: where the result goes, contiguous; None: into a new tensor.

    firsts: int64 [rows + 1], the first token of each row, and T. Tokens of a row see each other,
    as far as `window` to either side.
    """
    heads, tokens, value_dim = query.shape[1], query.shape[2], value.shape[3]
    if out is None:
        out = query.new_empty(1, tokens, heads, value_dim)
    strides = [each.stride(dim) for each in (query, key, value) for dim in (2, 1)]
    job = _Rows(
        *(each.data_ptr() for each in (query, key, value, out, firsts)),
        *strides,
        *(len(firsts) - 1, heads, key.shape[1], query.shape[3], value_dim),
        *(-1 if window is None else window, scale),
    )
    library().tm_row_attention(ctypes.byref(job), ctypes.c_int(query.dtype == torch.bfloat16))
    return out


def native_layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    added: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [..., F], weight and bias [F] of its dtype, float32 or bfloat16 -> a tensor of x's shape.

    added: added to x first, contiguous. out: where the result goes, contiguous, x and `added` too;
    None: into a new tensor.
    """
    x = x.contiguous()
    out = torch.empty_like(x) if out is None else out
    width = x.shape[-1]
    call("tm_layer_norm", (x, added, weight, bias, out), (x.numel() // width, width), eps)
    return out


def native_gelu(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """GELU of any shape, float32 or bfloat16, by erf within 1.5e-7.

    out: where the result goes, contiguous, x too; None: into a new tensor.
    """
    x = x.contiguous()
    out = torch.empty_like(x) if out is None else out
    call("tm_gelu", (x, out), (x.numel(),))
    return out
