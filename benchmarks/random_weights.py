"""Checkpoints of real shapes whose weights are written as fast as the disk takes them.

Drawing eight billion numbers takes minutes. Here one block of them is repeated, which no timing
notices.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from benchmarks.random_model import ModelShape

_DRAWN: Final = 1 << 20
_SHARD_BYTES: Final = 2 << 30
_SCALE: Final = 0.02


def write_weights(shape: ModelShape, folder: Path) -> None:
    """config.json and bfloat16 weights in shards; without a tokenizer."""
    import transformers

    config = getattr(transformers, f"{shape.family}Config")(**shape.config, dtype="bfloat16")
    kind: Any = getattr(transformers, f"{shape.family}ForCausalLM")
    config.architectures = [kind.__name__]
    config.save_pretrained(folder)
    with torch.device("meta"):
        tree = kind(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in tree.named_parameters()}
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(_shards(shapes)):
        file = f"model-{number:05}.safetensors"
        tensors = {name: _numbers(shapes[name]) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _shards(shapes: dict[str, tuple[int, ...]]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        names.append(name)
        size += 2 * math.prod(shape)
        if size >= _SHARD_BYTES:
            yield names
            names, size = [], 0
    if names:
        yield names


def _numbers(shape: tuple[int, ...]) -> torch.Tensor:
    """Norms are one; else small numbers, those of the block again and again."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    count = math.prod(shape)
    block = torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0)).mul_(_SCALE)
    repeated = block.bfloat16().repeat(-(-count // _DRAWN))[:count]
    return repeated.view(shape).clone()
