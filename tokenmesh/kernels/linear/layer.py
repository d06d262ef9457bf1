"""Linear: a weight in one of several forms, and what a step's adapters add to its product."""

from dataclasses import dataclass
from typing import Protocol

import torch

from tokenmesh.kernels.codes import Codes
from tokenmesh.kernels.linear.cpu import OneDnnWeight, PlainWeight, can_pack
from tokenmesh.kernels.lora import LoraBank, add_lora
from tokenmesh.kernels.native import NativeCodes, NativeWeight
from tokenmesh.kernels.quantized_linear import DeviceCodes, quantized_linear


class Weight(Protocol):
    """The weight and bias of a layer, in the form that one kernel reads."""

    def product(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x [T, I] -> x @ weight.T + bias [T, O] in x's dtype, or in `out_dtype`.

        out_dtype: x's dtype or float32.
        """


@dataclass(frozen=True, slots=True)
class DeviceWeight:
    """A weight that stays codes on a GPU."""

    codes: DeviceCodes

    def product(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return quantized_linear(x, self.codes, out_dtype or x.dtype)


@dataclass(slots=True, eq=False)
class Linear:
    """A layer ready for `linear`; made by `pack`."""

    weight: Weight
    adapters: LoraBank | None = None
    """Its place in the adapters of its model; set while that is built."""


def pack(weight: torch.Tensor, bias: torch.Tensor | None, native: bool = False) -> Linear:
    """Take over weight [O, I] and bias [O] in the fastest form for their device and dtype.

    native: the C kernels have been started. They read a bfloat16 weight 1.6 times as fast as oneDNN
    on one token.
    """
    if native and NativeWeight.fits(weight):
        return Linear(NativeWeight.pack(weight, bias))
    if weight.is_cuda or not can_pack(weight.dtype):
        return Linear(PlainWeight(weight, bias))
    return Linear(OneDnnWeight.pack(weight, bias))


def pack_codes(
    codes: Codes, bias: torch.Tensor | None, dtype: torch.dtype, native: bool = False
) -> Linear:
    """Take over codes for products with x of `dtype`: in their format where a kernel computes in
    it, else as a plain weight.

    In float32 products are those of the decoded weight. In bfloat16 the C kernel rounds x to int8,
    with a scale for at most 64 inputs; for E4M3 it multiplies numbers of bfloat16. A GPU computes
    with codes that it has a kernel for, see `DeviceCodes.problem`.
    """
    if codes.numbers.is_cuda and DeviceCodes.problem(codes) is None:
        return Linear(DeviceWeight(DeviceCodes.pack(codes, bias)))
    is_exact = dtype == torch.float32
    if native and dtype in (torch.float32, torch.bfloat16) and NativeCodes.fits(codes, is_exact):
        return Linear(NativeCodes.pack(codes, bias, is_exact))
    return pack(codes.decoded().to(dtype), bias, native)


def linear(
    x: torch.Tensor,
    layer: Linear,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, I] -> [T, O] in x's dtype, or in `out_dtype`: that or float32.

    out: where the result goes, contiguous and of that dtype; None: into a new tensor.
    """
    weight = layer.weight
    if out is None:
        out = weight.product(x, out_dtype)
    elif isinstance(weight, NativeWeight | NativeCodes):
        weight.product(x, out_dtype, out)
    else:
        out.copy_(weight.product(x, out_dtype))
    return add_lora(x, out, layer.adapters)
