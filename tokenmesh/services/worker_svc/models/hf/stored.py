"""The tensors of a checkpoint as transformers' loader reads them: by name, when it asks for one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import safe_open

from tokenmesh.services.worker_svc.models.checkpoint import Checkpoint, misshapen
from tokenmesh.services.worker_svc.models.mxfp4 import BLOCK_BYTES, dequantize
from tokenmesh.shared.errors import CheckpointError

_BYTES: Final = "U8"


class Stored(Protocol):
    """A tensor that is not read yet."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        """All of it, for `...`: on the file's pages, or a new one."""

    def get_shape(self) -> Sequence[int]:
        """Of all of it."""


@dataclass(frozen=True, slots=True)
class _Mxfp4:
    """Experts in MXFP4: [E, inputs, outputs] as gpt_oss multiplies with them."""

    name: str
    file: Path
    blocks: Stored
    """[E, outputs, inputs / 32, 16]."""
    scales: Stored
    dtype: torch.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        blocks, scales = self.blocks[index], self.scales[index]
        weight = torch.empty(tuple(self.get_shape()), dtype=self.dtype)
        for expert in range(len(weight)):  # what is between takes many times the memory
            weight[expert] = dequantize(blocks[expert], scales[expert], self.dtype).t()
            if not weight[expert].isfinite().all():
                problem = f"has numbers that {self.dtype} cannot hold, in expert {expert}"
                raise CheckpointError(f"{self.file}: tensor {self.name} {problem}")
        return weight

    def get_shape(self) -> Sequence[int]:
        """See `Stored.get_shape`."""
        num_experts, outputs, groups, _ = self.blocks.get_shape()
        return num_experts, 2 * BLOCK_BYTES * groups, outputs


def stored_tensors(
    checkpoint: Checkpoint, dtype: torch.dtype, buffer_types: tuple[str, ...], has_mxfp4: bool
) -> dict[str, Stored]:
    """All tensors by name; experts in MXFP4, if it may have any, under the name without `_blocks`.

    Raises CheckpointError for a tensor whose type is neither loaded nor in `buffer_types`, and for
    blocks and scales that do not fit.
    """
    shapes = checkpoint.shapes()
    pairs = dict(_pairs(checkpoint, shapes)) if has_mxfp4 else {}
    parts = frozenset(part for pair in pairs.values() for part in pair)
    checkpoint.check_types(buffer_types, apart=parts)
    opened: dict[Path, Any] = {}

    def stored(name: str) -> Any:
        file = checkpoint.file_of(name)
        if file not in opened:
            opened[file] = safe_open(file, framework="pt")
        return opened[file].get_slice(name)

    tensors: dict[str, Stored] = {name: stored(name) for name in shapes.keys() - parts}
    for name, (blocks, scales) in pairs.items():
        file = checkpoint.file_of(blocks)
        tensors[name] = _Mxfp4(name, file, stored(blocks), stored(scales), dtype)
    return tensors


def _pairs(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Blocks and scales by the name of what they make."""
    for blocks, shape in shapes.items():
        name = blocks.removesuffix("_blocks")
        if name == blocks or checkpoint.type_of(blocks) != _BYTES:
            continue
        scales = f"{name}_scales"
        file = checkpoint.file_of(blocks)
        if len(shape) != 4 or shape[-1] != BLOCK_BYTES:
            raise CheckpointError(
                f"{file}: tensor {blocks} has shape {list(shape)}, not [experts, outputs, "
                f"inputs / {2 * BLOCK_BYTES}, {BLOCK_BYTES}]"
            )
        if scales not in shapes or checkpoint.type_of(scales) != _BYTES:
            raise CheckpointError(f"{file}: tensor {blocks} has no {scales} of type {_BYTES}")
        if shapes[scales] != shape[:-1]:
            problem = misshapen(scales, shapes[scales], shape[:-1], blocks)
            raise CheckpointError(f"{checkpoint.file_of(scales)}: {problem}")
        yield name, (blocks, scales)
