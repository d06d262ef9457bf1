"""Linear layers on a packed weight, in one of three forms.

A packed weight is read once in the order in which the kernel wants it. Our own C kernel reads it
fastest where the processor has what it needs (1.6 times as fast as oneDNN on one bfloat16 token).
Elsewhere it is oneDNN's layout; there a small float32 layer on few tokens is all overhead, MKL's
plain gemm has a fifth of it, and such a layer keeps both forms.
"""

from dataclasses import dataclass
from typing import Final

import torch

from tokenmesh.kernels.native import NativeWeight, native_linear

MAX_PLAIN_PRODUCT: Final = 1 << 19
"""tokens * weight elements up to which the plain float32 gemm is the faster one."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight ready for `linear`; made by `pack`."""

    native: NativeWeight | None
    """The weight in our own layout; if set, the others are None."""
    plain: torch.Tensor | None
    """[out_features, in_features]; None when only a packed form is kept."""
    packed: torch.Tensor | None
    """oneDNN's opaque layout."""
    bias: torch.Tensor | None
    max_plain_tokens: int
    """Up to this many tokens the plain form is used."""


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has fast kernels for the dtype on this processor."""
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported()
    return dtype == torch.float32


def pack(weight: torch.Tensor, bias: torch.Tensor | None, native: bool = False) -> Linear:
    """Take over weight [O, I] and bias [O]; `native`: the C kernels have been started."""
    if native and NativeWeight.fits(weight):
        return Linear(NativeWeight.pack(weight, bias), None, None, bias, max_plain_tokens=0)
    if weight.is_cuda or not can_pack(weight.dtype):
        return Linear(None, weight, None, bias, max_plain_tokens=0)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    max_plain_tokens = 0
    if weight.dtype == torch.float32:
        max_plain_tokens = MAX_PLAIN_PRODUCT // weight.numel()
    plain = weight if max_plain_tokens else None
    return Linear(None, plain, packed, bias, max_plain_tokens)


def linear(x: torch.Tensor, layer: Linear, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """x [T, I] -> [T, O] in x's dtype, or in `out_dtype`: that or float32."""
    if layer.native is not None:
        return native_linear(x, layer.native, out_dtype)
    if layer.packed is not None and x.shape[0] > layer.max_plain_tokens:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, layer.packed, layer.bias, "none", [], ""
        )
    else:
        assert layer.plain is not None
        out = torch.nn.functional.linear(x, layer.plain, layer.bias)
    return out if out_dtype is None else out.to(out_dtype)
