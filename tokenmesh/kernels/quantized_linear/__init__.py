"""quantized_linear: y = x @ weight.T + bias on a GPU, with a weight that stays codes in memory.

x        [tokens, in_features]     float32, float16 or bfloat16; rows of a multiple of 16
weight   DeviceCodes               the codes that it takes are those without a `problem`
bias     [out_features] or None    in x's dtype
returns  [tokens, out_features]    a new tensor in x's dtype or float32

Codes are decoded to x's dtype in registers; sums are float32. Where the format rounds activations
as well and `multiplies_codes` says so, x is rounded to the type of the codes, with a scale for 128
inputs of a token, and codes are multiplied.
"""

from typing import Final

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.quantized_linear.device_codes import DeviceCodes
from tokenmesh.kernels.quantized_linear.reference import quantized_linear_reference

TOLERANCE: Final = {torch.float32: 5e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Absolute tolerances for outputs of about 1 to 5."""

__all__ = ["TOLERANCE", "DeviceCodes", "quantized_linear", "quantized_linear_reference"]


def quantized_linear(x: torch.Tensor, codes: DeviceCodes, out_dtype: torch.dtype) -> torch.Tensor:
    """x [T, I] -> [T, O] in out_dtype."""
    if uses_triton(x):
        from tokenmesh.kernels.quantized_linear import triton

        return triton.quantized_linear(x, codes, out_dtype)
    return quantized_linear_reference(x, codes, out_dtype)
