"""Parts of stored tensors: which rows and columns of each a rank reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Cut = Sequence[Sequence[slice]]
"""The pieces of each dimension of a tensor that a rank has."""
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class CutTensor:
    """A stored tensor of which a part is read, see `weights.Stored`."""

    stored: Any
    cut: Cut

    def get_shape(self) -> list[int]:
        return [sum(each.stop - each.start for each in pieces) for pieces in self.cut]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._read((), 0)[index]

    def _read(self, chosen: tuple[slice, ...], dim: int) -> torch.Tensor:
        if dim == len(self.cut):
            part: torch.Tensor = self.stored[chosen]
            return part
        parts = [self._read((*chosen, each), dim + 1) for each in self.cut[dim]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
