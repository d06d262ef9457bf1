"""bitsandbytes: 4 bits that index a table, and int8 with a maximum by row."""

import json
import math
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from tokenmesh.kernels.codes import Codes
from tokenmesh.kernels.linear.formats.parts import (
    FormatError,
    Part,
    Parts,
    Tensors,
    expect,
    part_of,
)
from tokenmesh.kernels.linear.formats.scaled import WHOLE, Scaled

_BYTES: Final = (torch.uint8,)
_FLOAT32: Final = (torch.float32,)
_TABLE: Final = 16
_NESTED_TABLE: Final = 256


@dataclass(frozen=True, slots=True)
class Bnb4:
    """weight: bytes of two indices, the first in the higher bits, of all numbers in their order.

    Each `blocksize` of them share a maximum; maxima may be bytes that index a table themselves.
    """

    kind: str
    """nf4 or fp4."""
    weight: str = field(default="weight", init=False)
    stored: tuple[torch.dtype, ...] = field(default=_BYTES, init=False)

    @property
    def others(self) -> tuple[str, ...]:
        names = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
        return (*(f"weight.{name}" for name in names), self._state)

    @property
    def _state(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    def shape_of(self, parts: Parts) -> tuple[int, ...]:
        state = self._state_of(part_of(parts, self._state, _BYTES, self.weight).read())
        outputs, inputs = state["shape"]
        count, size = outputs * inputs, state["blocksize"]
        width = -(-count // 2)
        expect(parts, self.weight, _BYTES, self._state, (width, 1), (1, width), (width,))
        expect(parts, "weight.quant_map", _FLOAT32, self.weight, (_TABLE,))
        blocks = -(-count // size)
        if "nested_blocksize" not in state:
            expect(parts, "weight.absmax", _FLOAT32, self.weight, (blocks,))
            return outputs, inputs
        expect(parts, "weight.absmax", _BYTES, self.weight, (blocks,))
        nested = (-(-blocks // state["nested_blocksize"]),)
        expect(parts, "weight.nested_absmax", _FLOAT32, self.weight, nested)
        expect(parts, "weight.nested_quant_map", _FLOAT32, self.weight, (_NESTED_TABLE,))
        return outputs, inputs

    def reference(self, tensors: Tensors) -> torch.Tensor:
        state = self._state_of(tensors[self._state])
        packed = tensors["weight"].flatten()
        count = math.prod(state["shape"])
        numbers = torch.stack((packed >> 4, packed & 15), -1).flatten()[:count]
        maxima = tensors["weight.absmax"]
        if "nested_blocksize" in state:
            of_blocks = tensors["weight.nested_absmax"]
            of_blocks = of_blocks.repeat_interleave(state["nested_blocksize"])[: len(maxima)]
            maxima = tensors["weight.nested_quant_map"][maxima.int()] * of_blocks
            maxima = maxima + state["nested_offset"]
        spread = maxima.repeat_interleave(state["blocksize"])[:count]
        return (tensors["weight.quant_map"][numbers.int()] * spread).view(state["shape"])

    def axes(self, _: Parts) -> None:
        """Return nothing: its blocks do not keep to rows."""

    def codes(self, _tensors: Tensors) -> Codes | None:
        """None: its table is of floats."""
        return None

    def _state_of(self, stored: torch.Tensor) -> dict[str, Any]:
        try:
            state = json.loads(bytes(stored.tolist()))
            shape = state["shape"]
            sizes = [*shape, state["blocksize"], state.get("nested_blocksize", 1)]
            is_right = len(shape) == 2 and all(type(size) is int and size > 0 for size in sizes)
            if "nested_blocksize" in state:
                float(state["nested_offset"])
            if is_right and state["quant_type"] == self.kind:
                return dict(state)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(self._state, f"cannot be read: {error!r}") from error
        raise FormatError(self._state, f"is {state!r}, not one of {self.kind} of a matrix")


_ROWS: Final = Scaled(
    stored=(torch.int8,),
    tile=(1, WHOLE),
    scales=("SCB",),
    scale_types=_FLOAT32,
    divisor=127.0,
)


@dataclass(frozen=True, slots=True)
class Bnb8:
    """weight int8 [O, I] times SCB [O] / 127."""

    weight: str = field(default="weight", init=False)
    stored: tuple[torch.dtype, ...] = field(default=(torch.int8,), init=False)
    others: tuple[str, ...] = field(default=("SCB", "weight_format"), init=False)

    def shape_of(self, parts: Parts) -> tuple[int, ...]:
        order: Part | None = parts.get("weight_format")
        if order is not None and order.read().any():
            raise FormatError("weight_format", "is not 0: rows one after the other")
        return _ROWS.shape_of(parts)

    def reference(self, tensors: Tensors) -> torch.Tensor:
        return _ROWS.reference(tensors)

    def axes(self, _: Parts) -> None:
        """Return nothing: its blocks do not keep to rows."""

    def codes(self, tensors: Tensors) -> Codes | None:
        return _ROWS.codes(tensors)
