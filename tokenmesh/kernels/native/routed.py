"""Routed: a layer's router and experts, as one operation of a program runs them."""

import ctypes
from dataclasses import dataclass
from typing import Self

import torch

from tokenmesh.kernels.native.experts import (
    AnyExperts,
    ExpertsArguments,
    Gate,
    arguments,
    as_bias,
    weight_tensors,
)
from tokenmesh.kernels.native.start import library
from tokenmesh.kernels.native.weight import NativeWeight


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "correction")),
        *((name, ctypes.c_int64) for name in ("router_is_bf16", "scores", "is_normalized")),
        ("scale", ctypes.c_float),
        ("layer", ExpertsArguments),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedTokens:
    """The choice of experts: `enum tm_scores` and the numbers of tm_routed."""

    top_k: int
    scores: int
    is_normalized: bool
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """The struct and the tensors that it points to."""

    _arguments: _Arguments
    _kept: tuple[torch.Tensor | None, ...]
    _experts: tuple[AnyExperts, ...]

    @classmethod
    def of(
        cls,
        router: NativeWeight,
        correction: torch.Tensor | None,
        choice: RoutedTokens,
        w13: AnyExperts,
        b13: torch.Tensor | None,
        w2: AnyExperts,
        b2: torch.Tensor | None,
        gate: Gate,
    ) -> Self:
        """router: in the experts' dtype or in float32; correction [E]; biases [E, outputs]."""
        dtype = w13.dtype
        assert dtype == w2.dtype
        assert router.panels.dtype in (dtype, torch.float32)
        assert router.out_features == w13.num_experts >= choice.top_k
        assert router.in_features == w2.out_features
        tensors = weight_tensors(w13, b13, w2, b2)
        bias = as_bias(router.bias, router.panels.dtype)
        correction = as_bias(correction, torch.float32)
        struct = _Arguments(
            weight=router.panels.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            correction=None if correction is None else correction.data_ptr(),
            router_is_bf16=router.panels.dtype == torch.bfloat16,
            scores=choice.scores,
            is_normalized=choice.is_normalized,
            scale=choice.scale,
            layer=arguments(tensors, choice.top_k, w13, w2, gate),
        )
        return cls(struct, (*tensors.values(), router.panels, bias, correction), (w13, w2))

    @property
    def address(self) -> int:
        """Address of the struct, which lives as long as this object."""
        return ctypes.addressof(self._arguments)

    def scratch_bytes(self, num_tokens: int) -> int:
        """Scratch memory that a step of this many tokens needs."""
        count = library().tm_routed_scratch
        count.restype = ctypes.c_int64
        return int(count(ctypes.byref(self._arguments), ctypes.c_int64(num_tokens)))
