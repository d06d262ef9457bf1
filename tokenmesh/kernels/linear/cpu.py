"""Linear layers on oneDNN's packed weight layout, where that wins.

A packed weight is read once in the order in which the kernel wants it: measured on Zen 5 it halves
the time of one-token bfloat16 layers and is 2.5 times as fast in float32 at 8 tokens. A small
float32 layer on few tokens is all overhead, and there MKL's plain gemm has a fifth of it: such a
layer keeps both forms.
"""

from dataclasses import dataclass
from typing import Final

import torch

MAX_PLAIN_PRODUCT: Final = 1 << 19
"""tokens * weight elements up to which the plain float32 gemm is the faster one."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight ready for `linear`; made by `pack`."""

    plain: torch.Tensor | None
    """[out_features, in_features]; None when only the packed form is kept."""
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


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Take over weight [O, I] and bias [O]."""
    if not can_pack(weight.dtype):
        return Linear(plain=weight, packed=None, bias=bias, max_plain_tokens=0)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    max_plain_tokens = 0
    if weight.dtype == torch.float32:
        max_plain_tokens = MAX_PLAIN_PRODUCT // weight.numel()
    return Linear(
        plain=weight if max_plain_tokens else None,
        packed=packed,
        bias=bias,
        max_plain_tokens=max_plain_tokens,
    )


def linear(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """x [T, I] -> [T, O]."""
    if layer.packed is not None and x.shape[0] > layer.max_plain_tokens:
        return torch.ops.mkldnn._linear_pointwise(  # type: ignore[no-any-return]
            x, layer.packed, layer.bias, "none", [], ""
        )
    assert layer.plain is not None
    return torch.nn.functional.linear(x, layer.plain, layer.bias)
