"""NativeExperts: a layer's experts in the panels that experts.inc reads, and their one call."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from tokenmesh.kernels import huge_pages
from tokenmesh.kernels.native.coded_experts import CodedExperts
from tokenmesh.kernels.native.start import library
from tokenmesh.kernels.native.weight import (
    PANEL,
    STEPS,
    NativeWeight,
    fill_panels,
    native_linear,
)

_I = ctypes.c_int64
_P = ctypes.c_void_p
_F = ctypes.c_float
_POINTERS: Final = (
    *("x", "ids", "weights", "w13", "b13", "w2", "b2", "codes13", "codes2", "out"),
    *("first", "hits", "pairs", "rows", "activated", "parts", "sums"),
)
_NUMBERS: Final = (
    *("tokens", "top_k", "experts", "hidden", "inner", "is_bf16", "is_gated", "activation"),
    "limits_activated_gate",
)


class ExpertsArguments(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in _POINTERS),
        *((name, _I) for name in _NUMBERS),
        *((name, _F) for name in ("alpha", "limit", "up_offset")),
    )


@dataclass(frozen=True, slots=True)
class NativeExperts:
    """One of the two stacks of weights of a layer; made by `NativeExperts.pack`."""

    panels: torch.Tensor
    """[E, panels, I / step, 32, step]; the panels of gate and up by turns where there are both."""
    out_features: int
    in_features: int
    num_slices: int
    """2: gate and up."""

    @property
    def num_experts(self) -> int:
        return len(self.panels)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights and of the tokens that they are multiplied with."""
        return self.panels.dtype

    def product(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """One expert: x [T, I] -> [T, O], its slices next to each other."""
        parts, size = self.num_slices, self.out_features // self.num_slices
        made = []
        for part in range(parts):
            panels = self.panels[expert, part::parts].contiguous()
            made.append(native_linear(x, NativeWeight(panels, None, size, self.in_features)))
        return made[0] if parts == 1 else torch.cat(made, dim=1)

    @classmethod
    def pack(cls, weight: torch.Tensor, num_slices: int) -> "NativeExperts":
        """Copy weight [E, O, I], all gates before all ups; any strides. See `fits`."""
        num_experts, out_features, in_features = weight.shape
        step = STEPS[weight.dtype]
        across = num_slices * -(-(out_features // num_slices) // PANEL)
        shape = (num_experts, across, in_features // step, PANEL, step)
        panels = huge_pages.empty(shape, weight.dtype)
        for own, expert in zip(panels, weight, strict=True):
            for i, part in enumerate(expert.chunk(num_slices)):
                fill_panels(own[i::num_slices], part)
        return cls(panels, out_features, in_features, num_slices)

    @staticmethod
    def fits(weight: torch.Tensor) -> bool:
        """Return whether the kernels know the dtype and the inputs of weight [E, O, I]."""
        step = STEPS.get(weight.dtype)
        return step is not None and weight.shape[2] % step == 0


AnyExperts = NativeExperts | CodedExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The function between the two products: `enum tm_activation` and the numbers of tm_experts."""

    activation: int
    alpha: float
    limit: float
    limits_activated_gate: bool
    up_offset: float


def native_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: AnyExperts,
    b13: torch.Tensor | None,
    w2: AnyExperts,
    b2: torch.Tensor | None,
    gate: Gate,
) -> torch.Tensor:
    """x [T, H], ids and weights [T, k], biases [E, outputs] -> [T, H].

    Raises IndexError for an id that is neither -1 nor from 0 to E.
    """
    assert x.dtype == w13.dtype == w2.dtype
    num_tokens, top_k = ids.shape
    num_pairs, num_experts, inner = num_tokens * top_k, w13.num_experts, w2.in_features
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    tensors = {
        "x": x.contiguous(),
        "ids": ids.to(torch.int64).contiguous(),
        "weights": weights.to(torch.float32).contiguous(),
        **weight_tensors(w13, b13, w2, b2),
        "out": out,
        "first": torch.empty(num_experts + 1, dtype=torch.int64),
        "hits": torch.empty(num_experts, dtype=torch.int64),
        "pairs": torch.empty(num_pairs, dtype=torch.int64),
        "rows": x.new_empty((num_pairs, x.shape[1])),
        "activated": x.new_empty((num_pairs, inner)),
        "parts": torch.empty((num_pairs, x.shape[1])),
    }
    layer = arguments(tensors, top_k, w13, w2, gate)
    layer.tokens = num_tokens
    sums = torch.empty(num_pairs * _sums_of(layer))
    layer.sums = sums.data_ptr()
    if library().tm_experts_run(ctypes.byref(layer)) != 0:
        raise IndexError(f"an expert's id is not from -1 to {num_experts}")
    return out


def _sums_of(layer: ExpertsArguments) -> int:
    count = library().tm_experts_sums
    count.restype = ctypes.c_int64
    return int(count(ctypes.byref(layer)))


def weight_tensors(
    w13: AnyExperts,
    b13: torch.Tensor | None,
    w2: AnyExperts,
    b2: torch.Tensor | None,
) -> dict[str, torch.Tensor | None]:
    """Weights and biases [E, outputs] as the struct has them."""
    coded = {"codes13": w13, "codes2": w2}
    plain = {"w13": w13, "w2": w2}
    return {
        **{name: w.panels for name, w in plain.items() if isinstance(w, NativeExperts)},
        **{name: w.addresses for name, w in coded.items() if isinstance(w, CodedExperts)},
        "b13": as_bias(b13, w13.dtype),
        "b2": as_bias(b2, w13.dtype),
    }


def arguments(
    tensors: Mapping[str, torch.Tensor | None],
    top_k: int,
    w13: AnyExperts,
    w2: AnyExperts,
    gate: Gate,
) -> ExpertsArguments:
    """A layer without tokens; the caller keeps the tensors, named as in the struct."""
    return ExpertsArguments(
        **{name: None if t is None else t.data_ptr() for name, t in tensors.items()},
        top_k=top_k,
        experts=w13.num_experts,
        hidden=w2.out_features,
        inner=w2.in_features,
        is_bf16=w13.dtype == torch.bfloat16,
        is_gated=w13.num_slices == 2,
        activation=gate.activation,
        limits_activated_gate=gate.limits_activated_gate,
        alpha=gate.alpha,
        limit=gate.limit,
        up_offset=gate.up_offset,
    )


def as_bias(bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """The argument as the kernels read it."""
    return None if bias is None else bias.to(dtype).contiguous()
