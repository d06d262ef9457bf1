"""NativeShorts: a float32 weight as 16-bit integers, in the panels that shorts.c reads."""

import ctypes
from dataclasses import dataclass
from typing import Final

import torch

from tokenmesh.kernels import huge_pages
from tokenmesh.kernels.native.start import library
from tokenmesh.kernels.native.weight import PANEL, fill_panels

_BLOCK: Final = 64
"""Inputs that share a scale; SHORTS_BLOCK."""
_MOST: Final = (1 << 13) - 1
"""Largest integer of x; SHORTS_MOST."""
_MOST_OF_BLOCK: Final = (2**31 - 1) // _MOST - _BLOCK
"""The most that sizes of a row's integers in a block may add up to; rounding adds at most 1/2 to
each."""
_LARGEST: Final = (1 << 15) - 1
_MIN_INPUTS: Final = 256
"""Fewer do not make up for rounding x."""
_ROWS_AT_ONCE: Final = 1024
"""Outputs that are rounded at a time, which bounds the memory for it."""
_TINY: Final = 1e-30
_P = ctypes.c_void_p


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("panels", "scales", "bias")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "columns")),
    )


@dataclass(frozen=True, slots=True, eq=False)
class NativeShorts:
    """Weight and bias of one layer; made by `NativeShorts.pack`.

    Takes about half the time of float32 and half the memory. Rounding moves results by about 1e-4.
    """

    panels: torch.Tensor
    """int16 [ceil(O / 32), columns / 2, 32, 2]"""
    scales: torch.Tensor
    """float32 [ceil(O / 32) * 32]"""
    bias: torch.Tensor | None
    out_features: int
    in_features: int
    arguments: _Arguments

    @staticmethod
    def fits(weight: torch.Tensor) -> bool:
        """Return whether the kernel takes the weight, which must be finite, and is faster."""
        if weight.dtype != torch.float32 or weight.shape[1] < _MIN_INPUTS:
            return False
        return bool(weight.abs().amax().isfinite())

    @classmethod
    def pack(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> "NativeShorts":
        """Round weight [O, I] and keep bias [O]; see `fits`."""
        outputs, inputs = weight.shape
        columns, num_panels = -(-inputs // _BLOCK) * _BLOCK, -(-outputs // PANEL)
        panels = huge_pages.empty((num_panels, columns // 2, PANEL, 2), torch.int16)
        scales = torch.zeros(num_panels * PANEL)
        for first in range(0, outputs, _ROWS_AT_ONCE):
            some = weight[first : first + _ROWS_AT_ONCE]
            numbers, scale = _rounded(some, columns)
            scales[first : first + len(some)] = scale
            begin = first // PANEL
            fill_panels(panels[begin : begin + -(-len(some) // PANEL)], numbers)
        kept = None if bias is None else bias.float().contiguous()
        arguments = _Arguments(
            panels=panels.data_ptr(),
            scales=scales.data_ptr(),
            bias=None if kept is None else kept.data_ptr(),
            outputs=outputs,
            inputs=inputs,
            columns=columns,
        )
        return cls(panels, scales, kept, outputs, inputs, arguments)

    def product(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """float32 x [T, I] -> float32 [T, O]."""
        assert out_dtype in (None, torch.float32)
        out = x.new_empty((x.shape[0], self.out_features))
        self.product_into(x, out)
        return out

    def product_into(self, x: torch.Tensor, out: torch.Tensor, has_gelu: bool = False) -> None:
        """float32 x [T, I] -> out [T, O], contiguous, with GELU applied or without."""
        if x.stride(1) != 1:
            x = x.contiguous()
        assert x.dtype == out.dtype == torch.float32
        assert x.shape[1] == self.in_features
        assert out.shape == (x.shape[0], self.out_features)
        assert out.is_contiguous()
        library().tm_shorts_linear(
            ctypes.byref(self.arguments),
            _P(x.data_ptr()),
            ctypes.c_long(x.stride(0)),
            _P(out.data_ptr()),
            ctypes.c_long(x.shape[0]),
            ctypes.c_int(has_gelu),
        )


def _rounded(weight: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int16 [O, columns], filled up with zeros, and the scale of each row."""
    wide = torch.nn.functional.pad(weight, (0, columns - weight.shape[1]))
    sums = wide.abs().view(len(wide), -1, _BLOCK).sum(-1, dtype=torch.float64).amax(1)
    largest = wide.abs().amax(1).double()
    scale = torch.maximum(sums / _MOST_OF_BLOCK, largest / _LARGEST).clamp_min(_TINY)
    return (wide / scale[:, None]).round().to(torch.int16), scale.float()
