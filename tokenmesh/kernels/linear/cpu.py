"""Weights in the forms that torch multiplies with: plain, and in oneDNN's layout.

oneDNN reads a weight in the order in which its kernel wants it. A small float32 layer on few tokens
is all overhead there; MKL's plain gemm has a fifth of it, and such a layer keeps both forms.
"""

from dataclasses import dataclass
from typing import Final

import torch

MAX_PLAIN_PRODUCT: Final = 1 << 19
"""tokens * weight elements up to which the plain float32 gemm is the faster one."""


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A weight as torch has it, on any device."""

    weight: torch.Tensor
    """[out_features, in_features]"""
    bias: torch.Tensor | None

    def product(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        out = torch.nn.functional.linear(x, self.weight, self.bias)
        return out if out_dtype is None else out.to(out_dtype)


@dataclass(frozen=True, slots=True)
class OneDnnWeight:
    """A weight in oneDNN's opaque layout; made by `OneDnnWeight.pack`."""

    packed: torch.Tensor
    plain: PlainWeight | None
    """For few tokens; None where it is never the faster one."""
    bias: torch.Tensor | None
    max_plain_tokens: int
    """Up to this many tokens the plain form is used."""

    @classmethod
    def pack(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> "OneDnnWeight":
        """Take over weight [O, I] and bias [O]; see `can_pack`."""
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        tokens = MAX_PLAIN_PRODUCT // weight.numel() if weight.dtype == torch.float32 else 0
        return cls(packed, PlainWeight(weight, bias) if tokens else None, bias, tokens)

    def product(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        if self.plain is not None and x.shape[0] <= self.max_plain_tokens:
            return self.plain.product(x, out_dtype)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.packed, self.bias, "none", [], ""
        )
        return out if out_dtype is None else out.to(out_dtype)


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has fast kernels for the dtype on this processor."""
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported()
    return dtype == torch.float32
