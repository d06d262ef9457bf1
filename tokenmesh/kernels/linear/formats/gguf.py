"""Blocks of GGUF: integers with scales in one piece of bytes, as llama.cpp lays them out.

Bytes [O, I / elements * size]. All of them become codes: number times scale, plus an offset.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from tokenmesh.kernels.codes import Codes
from tokenmesh.kernels.linear.formats.cut import INPUTS, OUTPUTS, Axes, Axis
from tokenmesh.kernels.linear.formats.mxfp4 import E2M1_CENTER, E2M1_TABLE, scales_of
from tokenmesh.kernels.linear.formats.parts import FormatError, Parts, Tensors, matrix

_BYTES: Final = (torch.uint8,)
_SMALL: Final = 32
"""Elements of a block of the simple types, and of a group in the others but Q6_K."""
_LARGE: Final = 256
_IQ4_CENTER: Final = 128
_IQ4: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ4_TABLE: Final = tuple(each + _IQ4_CENTER for each in _IQ4)


@dataclass(frozen=True, slots=True)
class _Layout:
    elements: int
    size: int
    """Bytes of a block."""
    codes: Callable[[torch.Tensor], Codes]
    """Makes codes of blocks [O, B, size]."""


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """A matrix of one type."""

    kind: str
    """Such as "Q4_K"."""
    weight: str = field(default="weight", init=False)
    stored: tuple[torch.dtype, ...] = field(default=_BYTES, init=False)
    others: tuple[str, ...] = field(default=(), init=False)

    def shape_of(self, parts: Parts) -> tuple[int, ...]:
        rows, width = matrix(parts, self.weight, _BYTES)
        layout = LAYOUTS[self.kind]
        if width % layout.size:
            problem = f"has rows of {width} bytes, which blocks of {layout.size} do not fill"
            raise FormatError(self.weight, problem)
        return rows, width // layout.size * layout.elements

    def axes(self, _: Parts) -> Axes:
        layout = LAYOUTS[self.kind]
        return {self.weight: (Axis(OUTPUTS), Axis(INPUTS, layout.elements, layout.size))}

    def codes(self, tensors: Tensors) -> Codes:
        layout, packed = LAYOUTS[self.kind], tensors[self.weight]
        return layout.codes(packed.view(len(packed), -1, layout.size))

    def reference(self, tensors: Tensors) -> torch.Tensor:
        return self.codes(tensors).decoded()


def _half(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """The float16 at byte `first` of each block [O, B, size] -> float32 [O, B]."""
    return blocks[..., first : first + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _split(numbers: torch.Tensor, *sizes: int) -> torch.Tensor:
    """[..., N] -> [..., *sizes]."""
    return numbers.reshape(*numbers.shape[:-1], *sizes)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., N] -> [..., 2N]: all lower halves, then all higher ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """[..., 4] -> [..., 32] of 0 or 16."""
    bits = (packed[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(-2) << 4


def _q8_0(blocks: torch.Tensor) -> Codes:
    return Codes((blocks[..., 2:] ^ 128).flatten(1), 8, _half(blocks, 0), _SMALL, center=128)


def _q4_0(blocks: torch.Tensor) -> Codes:
    return Codes(_nibbles(blocks[..., 2:]).flatten(1), 4, _half(blocks, 0), _SMALL, center=8)


def _q4_1(blocks: torch.Tensor) -> Codes:
    return Codes(
        _nibbles(blocks[..., 4:]).flatten(1),
        *(4, _half(blocks, 0), _SMALL),
        offsets=_half(blocks, 2),
    )


def _q5_0(blocks: torch.Tensor) -> Codes:
    numbers = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return Codes(numbers.flatten(1), 5, _half(blocks, 0), _SMALL, center=16)


def _q5_1(blocks: torch.Tensor) -> Codes:
    numbers = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return Codes(numbers.flatten(1), 5, _half(blocks, 0), _SMALL, offsets=_half(blocks, 2))


def _iq4_nl(blocks: torch.Tensor) -> Codes:
    return Codes(
        _nibbles(blocks[..., 2:]).flatten(1),
        *(4, _half(blocks, 0), _SMALL),
        kind="table",
        center=_IQ4_CENTER,
        table=_IQ4_TABLE,
    )


def _six_bits(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets [O, groups] of blocks with d, dmin and 12 bytes of 16 numbers."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), -1)
    offsets = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), -1)
    of_block, least = _half(blocks, 0)[..., None], _half(blocks, 2)[..., None]
    return (of_block * scales).flatten(1), (-least * offsets).flatten(1)


def _q4_k(blocks: torch.Tensor) -> Codes:
    scales, offsets = _six_bits(blocks)
    numbers = _nibbles(_split(blocks[..., 16:], 4, 32))
    return Codes(numbers.flatten(1), 4, scales, _SMALL, offsets=offsets)


def _q5_k(blocks: torch.Tensor) -> Codes:
    scales, offsets = _six_bits(blocks)
    numbers = _split(_nibbles(_split(blocks[..., 48:], 4, 32)).flatten(-2), 8, 32)
    fifth = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    return Codes((numbers | (fifth << 4)).flatten(1), 5, scales, _SMALL, offsets=offsets)


def _q6_k(blocks: torch.Tensor) -> Codes:
    low = _split(blocks[..., :128], 2, 2, 32)
    low = torch.stack((low & 15, low >> 4), -3)  # half, nibble, 32 of two: 128 numbers in order
    high = _split(blocks[..., 128:192], 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    numbers = low.flatten(-3, -2) | (((high >> shifts) & 3) << 4)
    scales = blocks[..., 192:208].view(torch.int8).float() * _half(blocks, 208)[..., None]
    return Codes(numbers.flatten(1), 6, scales.flatten(1), 16, center=32)


def _pairs_of_bits(packed: torch.Tensor) -> torch.Tensor:
    """[..., 64] -> [..., 256]: of each half, first all lowest pairs of bits."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    return ((_split(packed, 2, 1, 32) >> shifts) & 3).flatten(-3)


def _q2_k(blocks: torch.Tensor) -> Codes:
    packed = blocks[..., :16]
    of_block, least = _half(blocks, 80)[..., None], _half(blocks, 82)[..., None]
    scales, offsets = of_block * (packed & 15), -least * (packed >> 4)
    numbers = _pairs_of_bits(blocks[..., 16:80])
    return Codes(numbers.flatten(1), 4, scales.flatten(1), 16, offsets=offsets.flatten(1))


def _q3_k(blocks: torch.Tensor) -> Codes:
    third = (blocks[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    numbers = _pairs_of_bits(blocks[..., 32:96]) | (third.flatten(-2) << 2)
    high = blocks[..., None, 104:108] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    six = _nibbles(blocks[..., 96:104]) | ((high & 3).flatten(-2) << 4)
    scales = (six.float() - 32) * _half(blocks, 108)[..., None]
    return Codes(numbers.flatten(1), 4, scales.flatten(1), 16, center=4)


def _iq4_xs(blocks: torch.Tensor) -> Codes:
    packed = blocks[..., 4:8, None]
    low = torch.cat((packed & 15, packed >> 4), -1).flatten(-2)
    high = blocks[..., 2:4, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    six = low | ((high & 3).flatten(-2) << 4)
    scales = (six.float() - 32) * _half(blocks, 0)[..., None]
    return Codes(
        _nibbles(_split(blocks[..., 8:], 8, 16)).flatten(1),
        *(4, scales.flatten(1), _SMALL),
        kind="table",
        center=_IQ4_CENTER,
        table=_IQ4_TABLE,
    )


def _mxfp4(blocks: torch.Tensor) -> Codes:
    return Codes(
        _nibbles(blocks[..., 1:]).flatten(1),
        *(4, scales_of(blocks[..., 0]), _SMALL),
        kind="table",
        center=E2M1_CENTER,
        table=E2M1_TABLE,
    )


LAYOUTS: Final[Mapping[str, _Layout]] = {
    "Q4_0": _Layout(_SMALL, 18, _q4_0),
    "Q4_1": _Layout(_SMALL, 20, _q4_1),
    "Q5_0": _Layout(_SMALL, 22, _q5_0),
    "Q5_1": _Layout(_SMALL, 24, _q5_1),
    "Q8_0": _Layout(_SMALL, 34, _q8_0),
    "Q4_K": _Layout(_LARGE, 144, _q4_k),
    "Q5_K": _Layout(_LARGE, 176, _q5_k),
    "Q6_K": _Layout(_LARGE, 210, _q6_k),
    "IQ4_NL": _Layout(_SMALL, 18, _iq4_nl),
    "Q2_K": _Layout(_LARGE, 84, _q2_k),
    "Q3_K": _Layout(_LARGE, 110, _q3_k),
    "IQ4_XS": _Layout(_LARGE, 136, _iq4_xs),
    "MXFP4": _Layout(_SMALL, 17, _mxfp4),
}
