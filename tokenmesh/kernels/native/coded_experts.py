"""CodedExperts: a layer's experts as codes, each in the panels that quantized.c reads."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from tokenmesh.kernels import huge_pages
from tokenmesh.kernels.codes import Codes
from tokenmesh.kernels.native.codes import NativeCodes


@dataclass(frozen=True, slots=True, eq=False)
class CodedExperts:
    """One of the two stacks of weights of a layer; made by `CodedExperts.pack`."""

    parts: tuple[NativeCodes, ...]
    """The slices of each expert, one expert after the other."""
    addresses: torch.Tensor
    """int64 [E * slices]: of the struct of each part."""
    out_features: int
    in_features: int
    num_slices: int
    """2: gate and up."""
    dtype: torch.dtype
    """The type of the tokens that they are multiplied with."""

    @property
    def num_experts(self) -> int:
        return len(self.parts) // self.num_slices

    @staticmethod
    def fits(codes: Codes, dtype: torch.dtype) -> bool:
        """Return whether the kernels take one part's codes for tokens of a dtype."""
        known = dtype in (torch.float32, torch.bfloat16)
        return known and NativeCodes.fits(codes, dtype == torch.float32)

    @classmethod
    def pack(cls, experts: Iterable[Sequence[Codes]], dtype: torch.dtype, count: int) -> Self:
        """Copy the slices of `count` experts, one at a time; see `fits` and `NativeCodes.pack`.

        Panels of one size lie in one piece of memory: a process may have a few ten thousand pieces.
        """
        parts: list[NativeCodes] = []
        room: torch.Tensor | None = None
        num_slices = 1
        for slices in experts:
            num_slices = len(slices)
            for codes in slices:
                own = NativeCodes.pack(codes, None, dtype == torch.float32)
                if room is None:
                    room = huge_pages.empty((count * num_slices, *own.panels.shape), torch.uint8)
                parts.append(_moved(own, room[len(parts)]))
        addresses = torch.tensor([each.address for each in parts], dtype=torch.int64)
        outputs = num_slices * parts[0].out_features
        return cls(tuple(parts), addresses, outputs, parts[0].in_features, num_slices, dtype)

    def product(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """One expert: x [T, I] -> [T, O], its slices next to each other."""
        first = expert * self.num_slices
        made = [each.product(x) for each in self.parts[first : first + self.num_slices]]
        return made[0] if len(made) == 1 else torch.cat(made, dim=1)


def _moved(codes: NativeCodes, room: torch.Tensor) -> NativeCodes:
    """The same with its panels in `room` where they are as large; else as it is."""
    if room.shape != codes.panels.shape:
        return codes
    room.copy_(codes.panels)
    codes.arguments.codes = room.data_ptr()
    return replace(codes, panels=room)
