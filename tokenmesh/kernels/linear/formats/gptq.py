"""GPTQ: integers packed along the inputs, scales and zero points by group of inputs.

qweight [I / 32 * bits, O], qzeros [G, O / 32 * bits], scales [G, O], g_idx [I]: each input's group.
Files of the first version hold zero points less 1.
"""

import math
from dataclasses import dataclass, field
from typing import Final

import torch

from tokenmesh.kernels.codes import Codes
from tokenmesh.kernels.linear.formats.cut import INPUTS, OUTPUTS, Axes, Axis
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
)

_WORDS: Final = (torch.int32,)


@dataclass(frozen=True, slots=True)
class Gptq:
    """Integers of 2, 3, 4 or 8 bits."""

    bits: int
    group_size: int
    """-1: all inputs."""
    has_order: bool
    """Groups are of any inputs (desc_act), so that g_idx is needed."""
    zero_offset: int
    """Added to stored zero points: 1 in the first version, 0 in the second."""
    weight: str = field(default="qweight", init=False)
    stored: tuple[torch.dtype, ...] = field(default=_WORDS, init=False)
    others: tuple[str, ...] = field(default=("qzeros", "scales", "g_idx"), init=False)

    def shape_of(self, parts: Parts) -> tuple[int, ...]:
        rows, outputs = matrix(parts, self.weight, _WORDS)
        if rows * WORD_BITS % self.bits or outputs * self.bits % WORD_BITS:
            problem = f"has shape {[rows, outputs]}, which words of {self.bits} bits do not fill"
            raise FormatError(self.weight, problem)
        inputs = rows * WORD_BITS // self.bits
        groups = groups_of(inputs, self.group_size, self.weight)
        expect(parts, "scales", FLOATS, self.weight, (groups, outputs))
        width = outputs * self.bits // WORD_BITS
        expect(parts, "qzeros", _WORDS, self.weight, (groups, width))
        if self.has_order or "g_idx" in parts:
            expect(parts, "g_idx", _WORDS, self.weight, (inputs,))
        return outputs, inputs

    def reference(self, tensors: Tensors) -> torch.Tensor:
        numbers, zeros, scales, group = self._parts(tensors)
        return by_group(numbers, zeros, scales, group)

    def codes(self, tensors: Tensors) -> Codes | None:
        numbers, zeros, scales, group = self._parts(tensors)
        return codes_by_group(numbers, self.bits, zeros, scales, group)

    def axes(self, _: Parts) -> Axes:
        step = math.gcd(WORD_BITS, self.bits)
        words = WORD_BITS // step, self.bits // step
        size, column = self.group_size, Axis(OUTPUTS)
        group = None if size == -1 else Axis(INPUTS, size)
        row, counts = Axis(INPUTS, *words), Axis(INPUTS, counts=max(1, size))
        if self.has_order:
            return {
                self.weight: (None, column),
                "qzeros": (None, Axis(OUTPUTS, *words)),
                "scales": (None, column),
                "g_idx": (None,),
            }
        return {
            self.weight: (row, column),
            "qzeros": (group, Axis(OUTPUTS, *words)),
            "scales": (group, column),
            "g_idx": (counts,),
        }

    def _parts(
        self, tensors: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Numbers [O, I], zero points and scales [O, G], each input's group."""
        numbers = unpack_words(tensors["qweight"].t(), self.bits)
        scales = tensors["scales"].float()
        zeros = unpack_words(tensors["qzeros"], self.bits).int() + self.zero_offset
        # a stored zero point of -1 has all bits set
        zeros = (zeros & ((1 << self.bits) - 1)).float()
        inputs, groups = numbers.shape[1], len(scales)
        group = ordered_group(tensors.get("g_idx"), inputs, groups, self.has_order, "g_idx")
        return numbers, zeros.t(), scales.t(), group
