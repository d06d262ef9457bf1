"""NativeWeight: a linear layer's weight in the panels that gemm.inc reads."""

import ctypes
from dataclasses import dataclass
from typing import Final

import torch

from tokenmesh.kernels import huge_pages
from tokenmesh.kernels.native.rows import native_gelu
from tokenmesh.kernels.native.start import library

PANEL: Final = 32
STEPS: Final = {torch.float32: 1, torch.bfloat16: 2}
"""Neighboring inputs that one multiplication takes."""


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """Weight and bias of one layer; made by `NativeWeight.pack`."""

    panels: torch.Tensor
    """[ceil(O / 32), I / step, 32, step], filled up with zeros."""
    bias: torch.Tensor | None
    out_features: int
    in_features: int

    @classmethod
    def pack(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> "NativeWeight":
        """Copy weight [O, I] and keep bias [O]; `fits` says which weights can be taken."""
        out_features, in_features = weight.shape
        step, num_panels = STEPS[weight.dtype], -(-out_features // PANEL)
        steps = in_features // step
        panels = huge_pages.empty((num_panels, steps, PANEL, step), weight.dtype)
        fill_panels(panels, weight)
        kept = None if bias is None else bias.contiguous()
        return cls(panels, kept, out_features, in_features)

    def product(
        self,
        x: torch.Tensor,
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, I] -> [T, O] in x's dtype or, without a rounding, in float32; into `out`."""
        return native_linear(x, self, out_dtype, out)

    def product_into(self, x: torch.Tensor, out: torch.Tensor, has_gelu: bool = False) -> None:
        """x [T, I] -> out [T, O] of x's dtype, contiguous, with GELU applied or without."""
        native_linear(x, self, out=out)
        if has_gelu:
            native_gelu(out, out)

    def rows(self, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the weight: index [N] -> [N, I], a new tensor."""
        return self.panels[index // PANEL, :, index % PANEL].flatten(1).to(dtype)

    @staticmethod
    def fits(weight: torch.Tensor) -> bool:
        """Return whether the kernels know the dtype and the number of inputs."""
        step = STEPS.get(weight.dtype)
        return step is not None and weight.shape[1] % step == 0


def fill_panels(panels: torch.Tensor, weight: torch.Tensor) -> None:
    """Copy weight [O, I] to panels [ceil(O / 32), I / step, 32, step]."""
    steps, step = panels.shape[1], panels.shape[3]
    full = len(weight) // PANEL
    whole, rest = weight[: full * PANEL], weight[full * PANEL :]
    panels[:full] = whole.reshape(full, PANEL, steps, step).transpose(1, 2)
    if len(rest):
        panels[full, :, : len(rest)] = rest.reshape(len(rest), steps, step).transpose(0, 1)
        panels[full, :, len(rest) :] = 0


def native_linear(
    x: torch.Tensor,
    weight: NativeWeight,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, I], contiguous rows, -> [T, O] in x's dtype or, without a rounding, in float32.

    out: where the result goes, contiguous; None: into a new tensor.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    if out is None:
        out = x.new_empty((x.shape[0], weight.out_features), dtype=out_dtype or x.dtype)
    kernels = library()
    assert x.dtype == weight.panels.dtype
    assert out.dtype in (x.dtype, torch.float32)
    kernels.tm_linear(
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_long(x.stride(0)),
        ctypes.c_void_p(weight.panels.data_ptr()),
        ctypes.c_void_p(None if weight.bias is None else weight.bias.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int(out.dtype == torch.float32),
        ctypes.c_long(x.shape[0]),
        ctypes.c_long(weight.out_features),
        ctypes.c_long(weight.in_features),
        ctypes.c_int(x.dtype == torch.bfloat16),
    )
    return out
