"""Rows of KV pages: one head's key or value of one token, in the model's type or in 8 bits.

An int8 row ends with the float32 factor of its codes, by which its largest number is 127. 8-bit
floats hold numbers divided by a scale that the caller has; too large ones become the largest, NaN
stays NaN. The C kernels write and read the same bytes.
"""

from typing import Final

import torch

FACTOR_BYTES: Final = torch.float32.itemsize
FP8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
_LARGEST_CODE: Final = 127


def is_coded(dtype: torch.dtype) -> bool:
    """Return whether pages of this type hold codes of 8 bits."""
    return dtype.itemsize == 1


def row_elements(width: int, dtype: torch.dtype) -> int:
    """Elements of a row of pages for heads of this width."""
    return width + FACTOR_BYTES if dtype == torch.int8 else width


def row_width(elements: int, dtype: torch.dtype) -> int:
    """Width of the heads whose rows have so many elements."""
    return elements - FACTOR_BYTES if dtype == torch.int8 else elements


def head_width(pages: torch.Tensor) -> int:
    """Width of the heads in pages [*, elements of a row]."""
    return row_width(pages.shape[-1], pages.dtype)


def stored(pages: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that torch can copy and index."""
    return pages.view(torch.uint8) if is_coded(pages.dtype) else pages


def encode(x: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """x [*, width] -> rows [*, elements] of pages of a type; scale: of floats."""
    if not is_coded(dtype):
        return x.to(dtype) if scale == 1.0 else (x / scale).to(dtype)
    wide = x if x.dtype == torch.float64 else x.float()
    if dtype != torch.int8:
        limit = torch.finfo(dtype).max
        return (wide / scale).clamp(-limit, limit).to(dtype)
    factor = wide.abs().amax(-1, keepdim=True) / _LARGEST_CODE
    codes = (wide / torch.where(factor > 0, factor, 1.0)).round().nan_to_num().to(torch.int8)
    return torch.cat([codes, factor.float().view(torch.int8)], dim=-1)


def decode(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows [*, elements] of pages -> what they stand for [*, width] but for the scale of 8-bit
    floats. Codes of int8 are decoded in float32 first."""
    if rows.dtype != torch.int8:
        return rows.to(dtype)
    codes, factors = rows[..., :-FACTOR_BYTES], rows[..., -FACTOR_BYTES:]
    numbers = codes.float().mul_(factors.contiguous().view(torch.float32))
    return numbers.to(dtype)
