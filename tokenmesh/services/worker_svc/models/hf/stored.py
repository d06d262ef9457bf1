"""The tensors of a checkpoint as transformers' loader reads them: by name, when it asks for one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from tokenmesh.services.worker_svc.models.checkpoint import Checkpoint


class Stored(Protocol):
    """A tensor that is not read yet."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        """All of it, for `...`: on the file's pages, or a new one."""

    def get_shape(self) -> Sequence[int]:
        """Of all of it."""


@dataclass(frozen=True, slots=True)
class _Decoded:
    """A weight that is made of several tensors when it is read."""

    name: str
    shape: tuple[int, ...]
    checkpoint: Checkpoint
    dtype: torch.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        weight = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.checkpoint.take_into(self.name, weight)
        return weight[index]

    def get_shape(self) -> Sequence[int]:
        return self.shape


def stored_tensors(
    checkpoint: Checkpoint, dtype: torch.dtype, buffer_types: tuple[str, ...]
) -> dict[str, Stored]:
    """All tensors by name, quantized ones as `dtype`.

    Raises CheckpointError for a tensor whose type is neither loaded nor in `buffer_types`.
    """
    checkpoint.check_types(buffer_types)
    opened: dict[Path, Any] = {}

    def stored(name: str, shape: tuple[int, ...]) -> Stored:
        if checkpoint.is_encoded(name):
            return _Decoded(name, shape, checkpoint, dtype)
        file = checkpoint.file_of(name)
        if file not in opened:
            opened[file] = safe_open(file, framework="pt")
        tensor: Stored = opened[file].get_slice(name)
        return tensor

    return {name: stored(name, shape) for name, shape in checkpoint.shapes().items()}
