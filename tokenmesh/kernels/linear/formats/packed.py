"""pack-quantized of compressed-tensors: 4 or 8 bits along the inputs, with an offset.

weight_packed [O, words], weight_scale [O, G] (or [1]: all), weight_shape (O, I); a number q lies
there as q + 2^(bits - 1). weight_zero_point, if any, is packed along the outputs in the same way.
weight_g_idx [I], if any, is each input's group.
"""

from dataclasses import dataclass, field
from typing import Final

import torch

from tokenmesh.kernels.codes import Codes
from tokenmesh.kernels.linear.formats.cut import INPUTS, OUTPUTS, SHAPE, Axes, Axis
from tokenmesh.kernels.linear.formats.packing import (
    WORD_BITS,
    by_group,
    codes_by_group,
    ordered_group,
    unpack_words,
)
from tokenmesh.kernels.linear.formats.parts import (
    FLOATS,
    FormatError,
    Parts,
    Tensors,
    expect,
    groups_of,
    matrix,
    part_of,
)

_WORDS: Final = (torch.int32,)
_INDICES: Final = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class Packed:
    """Integers with a scale by group, row or tensor."""

    bits: int
    group_size: int
    """-1: all inputs."""
    is_tensor: bool
    """One scale for all rows."""
    has_zeros: bool
    has_order: bool
    """Groups are of any inputs (actorder "group")."""
    weight: str = field(default="weight_packed", init=False)
    stored: tuple[torch.dtype, ...] = field(default=_WORDS, init=False)
    others: tuple[str, ...] = field(
        default=("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"), init=False
    )

    def shape_of(self, parts: Parts) -> tuple[int, ...]:
        rows, words = matrix(parts, self.weight, _WORDS)
        shape = part_of(parts, "weight_shape", _INDICES, self.weight)
        if shape.shape != (2,):
            raise FormatError("weight_shape", f"has shape {list(shape.shape)}, not [2]")
        outputs, inputs = (int(size) for size in shape.read())
        if (rows, words) != (outputs, _words(inputs, self.bits)):
            stored = f"which {parts[self.weight].name} {[rows, words]} does not hold"
            raise FormatError("weight_shape", f"is {[outputs, inputs]}, {stored}")
        groups = groups_of(inputs, self.group_size, self.weight)
        shapes = [(1,), (1, 1)] if self.is_tensor else [(outputs, groups)]
        expect(parts, "weight_scale", FLOATS, self.weight, *shapes)
        if self.has_zeros:
            zeros = (_words(1 if self.is_tensor else outputs, self.bits), groups)
            expect(parts, "weight_zero_point", _WORDS, self.weight, zeros)
        elif "weight_zero_point" in parts:
            raise FormatError("weight_zero_point", "is stored, but the weights are symmetric")
        if self.has_order or "weight_g_idx" in parts:
            expect(parts, "weight_g_idx", _INDICES, self.weight, (inputs,))
        return outputs, inputs

    def reference(self, tensors: Tensors) -> torch.Tensor:
        return by_group(*self._parts(tensors))

    def codes(self, tensors: Tensors) -> Codes | None:
        numbers, zeros, scales, group = self._parts(tensors)
        return codes_by_group(numbers, self.bits, zeros, scales, group)

    def axes(self, parts: Parts) -> Axes:
        in_word, size = WORD_BITS // self.bits, self.group_size
        row = Axis(OUTPUTS)
        group = None if size == -1 else Axis(INPUTS, size)
        word: Axis | None = Axis(INPUTS, in_word)
        if self.has_order:
            group = word = None  # groups are of inputs from everywhere
        found: dict[str, tuple[Axis | None, ...] | str] = {
            self.weight: (row, word),
            "weight_shape": SHAPE,
            "weight_scale": (row, group),
            "weight_zero_point": (Axis(OUTPUTS, in_word), group),
            "weight_g_idx": (None if word is None else Axis(INPUTS, counts=max(1, size)),),
        }
        if self.is_tensor:
            found["weight_scale"] = (None,) * len(parts["weight_scale"].shape)
            found["weight_zero_point"] = (None, None)
        return found

    def _parts(
        self, tensors: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Numbers [O, I], zero points and scales [O, G] or [1, 1], each input's group."""
        inputs = int(tensors["weight_shape"][1])
        numbers = unpack_words(tensors["weight_packed"], self.bits, inputs)
        scales = tensors["weight_scale"].float()
        scales = scales.view(1, 1) if self.is_tensor else scales
        zeros = torch.full_like(scales, float(1 << (self.bits - 1)))
        if self.has_zeros:
            words = tensors["weight_zero_point"].t()
            zeros = unpack_words(words, self.bits, len(scales)).t().float()
        given = tensors.get("weight_g_idx")
        if given is not None and bool((given == -1).all()):
            given = None  # what stands for no order
        groups = scales.shape[1]
        order = ordered_group(given, inputs, groups, self.has_order, "weight_g_idx")
        return numbers, zeros, scales, order


def _words(count: int, bits: int) -> int:
    return -(-count // (WORD_BITS // bits))
