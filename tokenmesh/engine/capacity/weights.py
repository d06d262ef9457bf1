"""Define what a checkpoint's tensors take in memory, whole and as the part of one rank."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from tokenmesh.engine.models.api import ModelFacts
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.kernels.linear.formats.round import INT4_GROUP, Rounding

_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_EXPERT: Final = re.compile(r"\.experts\.")
_KEYS_OR_VALUES: Final = re.compile(r"\.(?:k_proj|v_proj)\.")
_ROUNDED_BYTES: Final[Mapping[Rounding, float]] = {
    "int8": 1.0,
    "fp8": 1.0,
    "int4": 0.5 + 4 / INT4_GROUP,
}
"""A number takes so many bytes, scales included."""


@dataclass(slots=True)
class LayerBytes:
    """Bytes of one layer by how ranks divide them."""

    whole: float = 0.0
    """Norms and biases, which each rank has."""
    keys_values: float = 0.0
    """Projections of KV heads, of which there may be fewer than ranks."""
    divided: float = 0.0
    experts: float = 0.0
    """All experts that a router chooses from take so many; divided, too."""

    def part(self, ranks: int, kv_heads: int) -> float:
        """Bytes of the rank with most."""
        fewest = min(ranks, kv_heads) if kv_heads else ranks
        return self.whole + self.keys_values / fewest + (self.divided + self.experts) / ranks


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """Bytes of all weights as they will be in memory."""

    layers: Sequence[LayerBytes]
    embedding: float
    head: float
    """0: it is the embedding."""
    rest: float
    """Norms and all that belongs to no layer."""
    num_params: int
    num_expert_params: int
    dtype: torch.dtype
    stored_bytes: int = field(default=0)
    """The files hold so many of it."""

    def part(self, ranks: int, kv_heads: int, layers: range) -> float:
        """Bytes of the rank with most in a stage with these layers. The first stage has the
        embedding and the head, since it draws."""
        found = sum(self.layers[number].part(ranks, kv_heads) for number in layers) + self.rest
        if layers.start == 0:
            found += (self.embedding + self.head) / ranks
        return found


def bytes_of(
    facts: ModelFacts, checkpoint: Checkpoint, dtype: torch.dtype, ignored: tuple[str, ...]
) -> ModelBytes:
    """Count every tensor that a worker reads, by the header of its file.

    `ignored`: prefixes of tensors that other services read. Raises CheckpointError.
    """
    if facts.quantization is not None:
        checkpoint.decode(facts.quantization)
    layers: defaultdict[int, LayerBytes] = defaultdict(LayerBytes)
    ends: list[float] = []
    rest = 0.0
    num_params = num_expert_params = 0
    for name, shape in checkpoint.shapes().items():
        if name.startswith(ignored) or name.endswith("rotary_emb.inv_freq"):
            continue
        numbers = math.prod(shape)
        num_params += numbers
        is_encoded = checkpoint.is_encoded(name)
        taken: float = checkpoint.stored_bytes(name) if is_encoded else numbers * dtype.itemsize
        found = _LAYER.search(name)
        if facts.rounding is not None and not is_encoded and len(shape) > 1 and found:
            taken = numbers * _ROUNDED_BYTES[facts.rounding]
        if found is None:
            if len(shape) == 2 and shape[0] == facts.vocab_size:
                ends.append(taken)
            else:
                rest += taken
            continue
        layer = layers[int(found[1])]
        if len(shape) < 2:
            layer.whole += taken
        elif _EXPERT.search(name):
            num_expert_params += numbers
            layer.experts += taken
        elif _KEYS_OR_VALUES.search(name):
            layer.keys_values += taken
        else:
            layer.divided += taken
    return ModelBytes(
        [layers[number] for number in sorted(layers)],
        ends[0] if ends else 0.0,
        sum(ends[1:]),
        rest,
        num_params,
        num_expert_params,
        dtype,
        checkpoint.num_bytes(ignored),
    )
