"""Checkpoint: the tensors of a model directory, each taken once, nothing left over.

A tensor that nobody asks for is an error like one that is missing: both mean that the model would
not compute what its authors trained.
"""

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from tokenmesh.shared.errors import CheckpointError

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
LEFT_OVER_SHOWN: Final = 5
"""Names listed in the error about unknown tensors."""


class Checkpoint:
    """All tensors of a directory, memory-mapped."""

    def __init__(self, directory: Path) -> None:
        """Open every shard. Raises CheckpointError when one is missing or broken."""
        self.directory = directory
        self._file_by_tensor: dict[str, Path] = {}
        self._open_files: dict[Path, Any] = {}
        self._taken: set[str] = set()
        index = directory / INDEX_FILE
        if index.exists():
            self._read_index(index)
        elif (directory / SINGLE_FILE).exists():
            self._open(directory / SINGLE_FILE)
        else:
            raise CheckpointError(
                f"{directory}: holds neither {SINGLE_FILE} nor {INDEX_FILE}; "
                "only safetensors checkpoints can be loaded"
            )

    def __contains__(self, name: object) -> bool:
        return name in self._file_by_tensor

    def __len__(self) -> int:
        return len(self._file_by_tensor)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A copy of the tensor in `dtype`. Raises CheckpointError that names it."""
        path = self._file_by_tensor.get(name)
        if path is None:
            raise CheckpointError(f"{self.directory}: tensor {name} {list(shape)} is missing")
        file = self._open_files[path]
        found = tuple(file.get_slice(name).get_shape())
        if found != shape:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(found)}; config.json asks for {list(shape)}"
            )
        tensor: torch.Tensor = file.get_tensor(name)
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{path}: tensor {name} has type {tensor.dtype}; "
                "supported are float32, float16 and bfloat16"
            )
        self._taken.add(name)
        return tensor.to(dtype, copy=True)

    def finish(self, ignored: tuple[str, ...]) -> None:
        """Raise CheckpointError when a tensor was not taken, unless its prefix is in `ignored`."""
        unknown = sorted(
            name
            for name in self._file_by_tensor
            if name not in self._taken and not name.startswith(ignored) and not _is_derived(name)
        )
        if unknown:
            more = len(unknown) - LEFT_OVER_SHOWN
            names = ", ".join(unknown[:LEFT_OVER_SHOWN]) + (f" and {more} more" if more > 0 else "")
            raise CheckpointError(f"{self.directory}: unknown tensors: {names}")

    def _read_index(self, index: Path) -> None:
        try:
            file_by_tensor = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shards = sorted(set(file_by_tensor.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: is no valid index ({error!r})") from error
        for shard in shards:
            self._open(self.directory / Path(shard).name)
        for name, shard in file_by_tensor.items():
            if name not in self._file_by_tensor:
                raise CheckpointError(f"{self.directory / shard}: tensor {name} is missing")

    def _open(self, path: Path) -> None:
        try:
            file: Any = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path}: cannot be read as safetensors: {error}; is the file complete?"
            ) from error
        self._open_files[path] = file
        self._file_by_tensor |= dict.fromkeys(file.keys(), path)


def _is_derived(name: str) -> bool:
    """Buffers that old checkpoints stored and that follow from config.json."""
    return name.endswith("rotary_emb.inv_freq")
