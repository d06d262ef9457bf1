"""AWQ in the layout "gemm": 4 bits packed along the outputs, in a permuted order.

qweight [I, O / 8], qzeros [G, O / 8], scales [G, O].
"""

from dataclasses import dataclass, field
from typing import Final

import torch

from tokenmesh.kernels.codes import Codes
from tokenmesh.kernels.linear.formats.cut import INPUTS, OUTPUTS, Axes, Axis
from tokenmesh.kernels.linear.formats.packing import codes_by_group, unpack_words
from tokenmesh.kernels.linear.formats.parts import (
    FLOATS,
    Parts,
    Tensors,
    expect,
    groups_of,
    matrix,
)

_WORDS: Final = (torch.int32,)
_BITS: Final = 4
_IN_WORD: Final = 8
_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word, counted from its lowest bits, its first to eighth output lie."""


@dataclass(frozen=True, slots=True)
class Awq:
    """Integers of 4 bits with zero points."""

    group_size: int
    """-1: all inputs."""
    weight: str = field(default="qweight", init=False)
    stored: tuple[torch.dtype, ...] = field(default=_WORDS, init=False)
    others: tuple[str, ...] = field(default=("qzeros", "scales"), init=False)

    def shape_of(self, parts: Parts) -> tuple[int, ...]:
        inputs, width = matrix(parts, self.weight, _WORDS)
        groups = groups_of(inputs, self.group_size, self.weight)
        expect(parts, "scales", FLOATS, self.weight, (groups, width * _IN_WORD))
        expect(parts, "qzeros", _WORDS, self.weight, (groups, width))
        return width * _IN_WORD, inputs

    def reference(self, tensors: Tensors) -> torch.Tensor:
        numbers = _outputs(tensors["qweight"])
        zeros, scales = _outputs(tensors["qzeros"]), tensors["scales"].float()
        products = numbers.view(len(scales), -1, numbers.shape[1])
        return products.sub_(zeros[:, None]).mul_(scales[:, None]).flatten(0, 1).t()

    def axes(self, _: Parts) -> Axes:
        group = None if self.group_size == -1 else Axis(INPUTS, self.group_size)
        words = Axis(OUTPUTS, _IN_WORD)
        return {
            self.weight: (Axis(INPUTS), words),
            "qzeros": (group, words),
            "scales": (group, Axis(OUTPUTS)),
        }

    def codes(self, tensors: Tensors) -> Codes | None:
        numbers = unpack_words(tensors["qweight"], _BITS, places=_PLACES).t()
        zeros, scales = _outputs(tensors["qzeros"]), tensors["scales"].float()
        return codes_by_group(numbers, _BITS, zeros.t(), scales.t(), None)


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """int32 [N, O / 8] -> float32 [N, O]."""
    return unpack_words(words, _BITS, places=_PLACES).float()
