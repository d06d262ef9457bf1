"""Linear layers on oneDNN's packed weight layout, where that wins.

A packed weight is read once in the order in which the kernel wants it: measured on Zen 5 it halves
the time of one-token bfloat16 layers and is 2.5 times as fast in float32 at 8 tokens. Small
float32 weights stay in the cache, and there MKL's plain gemm has five times less overhead.
"""

from dataclasses import dataclass
from typing import Final

import torch

MIN_PACKED_FLOAT32: Final = 1 << 19
"""Elements from which on packing a float32 weight pays."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight ready for `linear`; made by `pack`."""

    weight: torch.Tensor
    """Plain [out_features, in_features], or oneDNN's opaque layout."""
    bias: torch.Tensor | None
    is_packed: bool


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has fast kernels for the dtype on this processor."""
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported()
    return dtype == torch.float32


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Take over weight [O, I] and bias [O]; the plain weight is not kept when it is packed."""
    worth = weight.dtype == torch.bfloat16 or weight.numel() >= MIN_PACKED_FLOAT32
    if worth and can_pack(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        return Linear(weight=packed, bias=bias, is_packed=True)
    return Linear(weight=weight, bias=bias, is_packed=False)


def linear(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """x [T, I] -> [T, O]."""
    if layer.is_packed:
        return torch.ops.mkldnn._linear_pointwise(  # type: ignore[no-any-return]
            x, layer.weight, layer.bias, "none", [], ""
        )
    return torch.nn.functional.linear(x, layer.weight, layer.bias)
