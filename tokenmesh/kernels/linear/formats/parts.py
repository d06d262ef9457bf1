"""Part: a tensor that a module's weight is decoded from, checked before it is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from tokenmesh.kernels.codes import Codes
from tokenmesh.kernels.linear.formats.cut import Axes

FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)


class FormatError(ValueError):
    """A tensor that a format cannot read; `part`: its name, relative to the module."""

    def __init__(self, part: str, problem: str) -> None:
        super().__init__(f"{part} {problem}")
        self.part = part
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor in a file."""

    name: str
    """Name in the file, for errors."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    """All of it, on the CPU."""
    read_slices: Callable[[tuple[slice, ...]], torch.Tensor] | None = None
    """Some of each dimension, without the bytes of the rest."""

    def some(self, slices: tuple[slice, ...]) -> torch.Tensor:
        """Read some of each dimension."""
        if self.read_slices is None or all(
            each == slice(0, size) for each, size in zip(slices, self.shape, strict=True)
        ):
            return self.read()[slices]
        return self.read_slices(slices)


Parts = Mapping[str, Part]
"""Tensors by name, relative to the module."""
Tensors = Mapping[str, torch.Tensor]
"""The same, read."""


class Format(Protocol):
    """Reads the weight of a module as one method of quantization stores it."""

    @property
    def weight(self) -> str:
        """The tensor, relative to the module, by which a stored module is found."""

    @property
    def stored(self) -> tuple[torch.dtype, ...]:
        """Its types; a tensor of this name in another one is a plain weight."""

    @property
    def others(self) -> tuple[str, ...]:
        """Further tensors of the module that are decoded with it, where they are stored."""

    def shape_of(self, parts: Parts) -> tuple[int, ...]:
        """The decoded weight's shape [O, I]. Raises FormatError where the parts do not fit."""

    def reference(self, tensors: Tensors) -> torch.Tensor:
        """float32 [O, I]: what the parts stand for. Raises FormatError for bad numbers."""

    def axes(self, parts: Parts) -> Axes | None:
        """Return how outputs and inputs lie in the parts; None: a weight is read whole."""

    def codes(self, tensors: Tensors) -> Codes | None:
        """The same as codes that kernels compute with; None where the format is none of them.

        Raises FormatError for bad numbers.
        """


def part_of(parts: Parts, name: str, dtypes: tuple[torch.dtype, ...], requiring: str) -> Part:
    """A part of one of the types. Raises FormatError; `requiring`: the part that requires it."""
    part = parts.get(name)
    if part is None:
        raise FormatError(requiring, f"has no {name} next to it")
    if part.dtype not in dtypes:
        known = ", ".join(_spelled(dtype) for dtype in dtypes)
        raise FormatError(name, f"has type {_spelled(part.dtype)}, not {known}")
    return part


def matrix(parts: Parts, name: str, dtypes: tuple[torch.dtype, ...]) -> tuple[int, int]:
    """The shape of a part of two dimensions. Raises FormatError."""
    shape = part_of(parts, name, dtypes, name).shape
    if len(shape) != 2:
        raise FormatError(name, f"has shape {list(shape)}, not two dimensions")
    return shape[0], shape[1]


def expect(
    parts: Parts,
    name: str,
    dtypes: tuple[torch.dtype, ...],
    requiring: str,
    *shapes: tuple[int, ...],
) -> None:
    """Raise FormatError unless a part has one of the types and one of the shapes."""
    shape = part_of(parts, name, dtypes, requiring).shape
    if shape not in shapes:
        asked = " or ".join(str(list(each)) for each in shapes)
        other = parts[requiring].name
        raise FormatError(name, f"has shape {list(shape)}; {other} asks for {asked}")


def groups_of(inputs: int, group_size: int, part: str) -> int:
    """Groups of that many inputs (-1: all of them). Raises FormatError where it does not divide."""
    size = inputs if group_size == -1 else group_size
    if size < 1 or inputs % size:
        raise FormatError(part, f"has {inputs} inputs, which groups of {size} do not divide")
    return inputs // size


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
