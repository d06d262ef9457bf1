"""NativeCodes: a quantized weight in the panels that quantized.c reads."""

import ctypes
from dataclasses import dataclass
from typing import Final, Self

import torch

from tokenmesh.kernels import huge_pages
from tokenmesh.kernels.codes import Codes
from tokenmesh.kernels.native.start import library
from tokenmesh.kernels.native.weight import PANEL

_BLOCKS: Final = (64, 32, 16)
"""Columns that may share an activation's scale, the fastest first."""
_FOUR: Final = 4
"""Columns of a panel that lie next to each other."""
_LOWER_BITS: Final = 0x0F0F0F0F
"""The lower four bits of each byte of a word."""
_FIRST_BITS: Final = 0x0101010101010101
_TO_HIGHEST_BYTE: Final = 0x0102040810204080
_PANELS_AT_ONCE: Final = 256
"""Packing so few panels at a time bounds its memory."""
_KINDS: Final = ("integers", "table", "e4m3")
_FLOATS, _INT8, _BFLOAT16 = range(3)
"""`enum tm_activations`."""
_I = ctypes.c_int64
_P = ctypes.c_void_p


class CodesArguments(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("codes", "scales", "offsets", "channel", "bias", "order")),
        *((name, _I) for name in ("outputs", "inputs", "block", "blocks", "groups")),
        *((name, _I) for name in ("group_blocks", "bits", "kind", "center", "scales_are_half")),
        ("activations", _I),
        ("table", ctypes.c_uint8 * 16),
    )


@dataclass(frozen=True, slots=True, eq=False)
class NativeCodes:
    """Weight and bias of one layer; made by `NativeCodes.pack`."""

    panels: torch.Tensor
    """uint8, see quantized.c."""
    scales: torch.Tensor | None
    """[panels, G, 32] float16 or float32, to be multiplied by `channel`; None: 1."""
    offsets: torch.Tensor | None
    channel: torch.Tensor
    """float32 [panels * 32]"""
    bias: torch.Tensor | None
    """float32 [O]"""
    order: torch.Tensor | None
    """int32 [I]"""
    out_features: int
    in_features: int
    arguments: CodesArguments

    @staticmethod
    def fits(codes: Codes, is_exact: bool) -> bool:
        """Return whether the kernels take groups of this size, and this processor the codes."""
        if codes.kind == "e4m3" and not is_exact and not library().tm_has_e4m3():
            return False
        return codes.group_size >= codes.shape[1] or codes.group_size % _BLOCKS[-1] == 0

    @classmethod
    def pack(cls, codes: Codes, bias: torch.Tensor | None, is_exact: bool) -> Self:
        """Copy codes; see `fits`. is_exact: activations stay float, and scales float32.

        Else activations are rounded, to bfloat16 for E4M3 and to int8 in blocks of at most 64
        inputs for others, and scales to 11 bits.
        """
        outputs, inputs = codes.shape
        is_one = codes.group_size >= inputs
        block = next(b for b in _BLOCKS if is_one or codes.group_size % b == 0)
        columns = -(-inputs // block) * block
        if not is_one:
            columns = codes.scales.shape[1] * codes.group_size
        is_half = not is_exact
        channel, scales, offsets = _factors(codes, is_half and not is_one)
        kept = None if bias is None else bias.float().contiguous()
        order = None if codes.order is None else codes.order.int().contiguous()
        is_narrowed = not is_exact and codes.kind == "e4m3"
        packed = _panels(codes, columns, is_narrowed)
        arguments = CodesArguments(
            codes=packed.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
            offsets=None if offsets is None else offsets.data_ptr(),
            channel=channel.data_ptr(),
            bias=None if kept is None else kept.data_ptr(),
            order=None if order is None else order.data_ptr(),
            outputs=outputs,
            inputs=inputs,
            block=block,
            blocks=columns // block,
            groups=codes.scales.shape[1],
            group_blocks=(columns if is_one else codes.group_size) // block,
            bits=codes.bits,
            kind=_KINDS.index(codes.kind),
            center=codes.center,
            scales_are_half=is_half and not is_one,
            activations=_FLOATS if is_exact else _BFLOAT16 if is_narrowed else _INT8,
        )
        arguments.table[:] = codes.table or (0,) * len(arguments.table)
        return cls(packed, scales, offsets, channel, kept, order, outputs, inputs, arguments)

    def product(
        self,
        x: torch.Tensor,
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, I] -> [T, O] in x's dtype or, without a rounding, in float32; into `out`."""
        if x.stride(1) != 1:
            x = x.contiguous()
        if out is None:
            out = x.new_empty((x.shape[0], self.out_features), dtype=out_dtype or x.dtype)
        assert out.is_contiguous()
        assert out.shape == (x.shape[0], self.out_features)
        assert x.dtype in (torch.float32, torch.bfloat16)
        assert x.shape[1] == self.in_features
        assert out.dtype in (x.dtype, torch.float32)
        library().tm_quantized_linear(
            ctypes.byref(self.arguments),
            _P(x.data_ptr()),
            ctypes.c_long(x.stride(0)),
            _P(out.data_ptr()),
            ctypes.c_int(out.dtype == torch.float32),
            ctypes.c_long(x.shape[0]),
            ctypes.c_int(x.dtype == torch.bfloat16),
        )
        return out

    @property
    def address(self) -> int:
        """Address of the struct, which lives as long as this object."""
        return ctypes.addressof(self.arguments)

    def rows(self, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the decoded weight: index [N] -> [N, I]. Raises IndexError for one that is not
        an output."""
        index = index.long().contiguous()
        count = index.shape[0]
        out = torch.empty((count, self.in_features), dtype=dtype)
        assert dtype in (torch.float32, torch.bfloat16)
        problem = library().tm_quantized_rows(
            ctypes.byref(self.arguments),
            _P(index.data_ptr()),
            ctypes.c_long(count),
            _P(out.data_ptr()),
            ctypes.c_int(dtype == torch.bfloat16),
        )
        if problem:
            raise IndexError(f"an index is not from 0 to {self.out_features - 1}")
        return out


def _panels(codes: Codes, columns: int, in_pairs: bool) -> torch.Tensor:
    """uint8 [panels, bytes of a panel], as quantized.c has them; in_pairs: for bfloat16."""
    outputs, inputs = codes.shape
    count = -(-outputs // PANEL)
    panels = huge_pages.empty((count, PANEL * columns * codes.bits // 8), torch.uint8)
    for first in range(0, count, _PANELS_AT_ONCE):
        wide = codes.numbers[first * PANEL : (first + _PANELS_AT_ONCE) * PANEL]
        room = -(-len(wide) // PANEL)
        if wide.shape != (room * PANEL, columns) or not wide.is_contiguous():
            filled = wide.new_zeros((room * PANEL, columns))
            filled[: len(wide), :inputs] = wide
            wide = filled
        if in_pairs:
            # of 4 outputs: columns 0 and 1 of all of them, then columns 2 and 3
            pairs = wide.view(torch.int16).view(room, PANEL // 4, 4, columns // _FOUR, 2)
            laid_out = pairs.permute(0, 3, 1, 4, 2).flatten(1).view(torch.uint8)
        else:
            # moved as words of four codes
            words = wide.view(torch.int32).view(room, PANEL, columns // _FOUR)
            laid_out = _laid_out(words.transpose(1, 2).contiguous(), codes.bits)
        panels[first : first + room] = laid_out
    return panels


def _laid_out(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Four codes each, int32 [panels, columns / 4, 32] -> bytes [panels, *]."""
    if bits == 8:
        return words.flatten(1).view(torch.uint8)
    lower = (words[:, 0::2] & _LOWER_BITS) | ((words[:, 1::2] & _LOWER_BITS) << 4)
    if bits == 4:
        return lower.flatten(1).view(torch.uint8)
    # for 16 columns: 2 steps of 8, of which each has 2 parts, of 2 halves of the outputs
    eights = words.view(torch.int64).view(len(words), -1, 2, 2, 2, PANEL // 4).transpose(3, 4)
    pieces = [lower.view(len(lower), eights.shape[1], -1).view(torch.uint8)]
    for bit in range(4, bits):
        # the bits of 8 bytes, moved to the highest byte of the product
        bytes_of_bits = ((eights >> bit) & _FIRST_BITS) * _TO_HIGHEST_BYTE
        pieces.append((bytes_of_bits >> 56).to(torch.uint8).flatten(2))
    return torch.cat(pieces, -1).flatten(1)


def _factors(
    codes: Codes, is_half: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Channel factors [panels * 32], and the scales and offsets that they are multiplied with.

    In float16 the factors are powers of two that bring the largest below 1, so that scales of up to
    11 bits stay what they are.
    """
    count = -(-codes.shape[0] // PANEL) * PANEL
    scales, offsets = codes.scales.float(), codes.offsets
    if scales.shape[1] == 1 and offsets is None:
        return _filled(scales[:, 0], count), None, None
    channel = torch.ones(len(scales))
    if is_half:
        largest = scales.abs().amax(1)
        if offsets is not None:
            # float16 holds up to 65504, and offsets are some times as large as scales
            largest = torch.maximum(largest, offsets.abs().amax(1) / 256)
        channel = torch.exp2(largest.clamp_min(1e-30).log2().ceil())
    dtype = torch.float16 if is_half else torch.float32

    def by_panel(factors: torch.Tensor) -> torch.Tensor:
        relative = _filled(factors / channel[:, None], count).to(dtype)
        return relative.view(-1, PANEL, factors.shape[1]).transpose(1, 2).contiguous()

    found = None if offsets is None else by_panel(offsets)
    return _filled(channel, count), by_panel(scales), found


def _filled(rows: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])
