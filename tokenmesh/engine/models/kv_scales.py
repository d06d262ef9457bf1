"""Scales of stored keys and values that a checkpoint brings, under the names that exporters use.

`...layers.N....k_scale` and `v_scale`, of the attention or of a projection in it; `kv_scale`, an
older name for both; `k_proj.output_scale` and `v_proj.output_scale`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from tokenmesh.engine.models.kv_store import NO_SCALE, KvScale
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.tensor_file import TensorShards

_NAME: Final = re.compile(
    r"(?:.*?\.)?(\d+)\.(?:.*\.)?"
    r"(?:(k|v|kv)_(scale|zero_point)|(k|v)_proj\.output_scale)\Z"
)
_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class KvScales:
    """Those of a checkpoint."""

    names: frozenset[str] = frozenset()
    """Tensors that hold them."""
    by_layer: Mapping[int, KvScale] | None = None

    def of(self, num_layers: int, first: int = 0) -> tuple[KvScale, ...]:
        """One for each layer; none where the checkpoint has none."""
        if not self.by_layer:
            return ()
        return tuple(
            self.by_layer.get(layer, NO_SCALE) for layer in range(first, first + num_layers)
        )


NO_SCALES: Final = KvScales()


def read_kv_scales(directory: Path) -> KvScales:
    """Raises CheckpointError for a scale that is not one positive number, for two of one layer, and
    for zero points other than 0."""
    shards = TensorShards(directory, lambda name: _NAME.match(name) is not None)
    found: dict[tuple[int, str], float] = {}
    for name in shards:
        match = _NAME.match(name)
        assert match is not None
        value = _number(shards, name)
        what = match[2] or match[4]
        if match[3] == "zero_point":
            if value:
                raise _error(shards, name, f"is {value:g}; only keys and values around 0 are read")
            continue
        if not (value > 0 and math.isfinite(value)):
            raise _error(shards, name, f"is {value:g}, which is not a scale")
        for each in what:
            if (int(match[1]), each) in found:
                raise _error(shards, name, f"is a second scale of layer {match[1]}")
            found[int(match[1]), each] = value
    by_layer = {}
    for layer in {layer for layer, _ in found}:
        key = found.get((layer, "k"))
        value = found.get((layer, "v"), key or 1.0)
        by_layer[layer] = KvScale(value if key is None else key, value)
    return KvScales(frozenset(shards), by_layer)


def _number(shards: TensorShards, name: str) -> float:
    file = shards.file_of(name)
    entry = file[name]
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise _error(shards, name, f"has type {entry.dtype}; supported are {', '.join(_DTYPES)}")
    if math.prod(entry.shape) != 1:
        raise _error(shards, name, f"has shape {list(entry.shape)}; a layer has one scale")
    number = torch.empty(1, dtype=dtype, device="cpu")
    file.read_into(name, number.view(torch.uint8).numpy().data)
    return float(number)


def _error(shards: TensorShards, name: str, problem: str) -> CheckpointError:
    return CheckpointError(f"{shards.file_of(name).path}: tensor {name} {problem}")
