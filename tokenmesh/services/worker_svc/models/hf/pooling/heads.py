"""make_head: what a checkpoint has behind its body, as a PoolHead."""

from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from tokenmesh.services.worker_svc.models.hf.facts import HfFacts
from tokenmesh.services.worker_svc.models.pooling.facts import EMBEDDINGS, PoolingFacts
from tokenmesh.services.worker_svc.models.pooling.heads import DenseLayer, PoolHead, VectorHead
from tokenmesh.services.worker_svc.models.pooling.modules import (
    Dense,
    SentenceModules,
    read_modules,
)
from tokenmesh.shared.errors import CheckpointError


def make_head(facts: HfFacts, pooling: PoolingFacts, model: PreTrainedModel) -> PoolHead:
    """Raises CheckpointError for modules that do not fit the model."""
    if set(pooling.tasks) & EMBEDDINGS:
        modules = read_modules(facts.directory) or SentenceModules()
        return _vector_head(modules, facts)
    raise CheckpointError(f"{facts.architecture}: no head")


def _vector_head(modules: SentenceModules, facts: HfFacts) -> VectorHead:
    layers: list[DenseLayer] = []
    width = facts.hidden_size * len(modules.takes)
    is_last = False
    for step in modules.steps:
        if is_last:
            raise CheckpointError(f"{facts.directory}/modules.json: Normalize is not the last")
        if isinstance(step, Dense):
            layers.append(_layer(step, width))
            width = step.outputs
        is_last = step == "normalize"
    return VectorHead(modules.takes, tuple(layers), normalizes=is_last or not modules.is_stated)


def _layer(dense: Dense, width: int) -> DenseLayer:
    path = dense.directory / "model.safetensors"
    if not path.exists():
        raise CheckpointError(f"{dense.directory}: holds no model.safetensors")
    tensors: dict[str, Any] = load_file(path)
    names = {"linear.weight", "linear.bias"} if dense.has_bias else {"linear.weight"}
    if set(tensors) != names:
        raise CheckpointError(f"{path}: holds {sorted(tensors)}, not {sorted(names)}")
    weight, bias = tensors["linear.weight"].float(), tensors.get("linear.bias")
    if tuple(weight.shape) != (dense.outputs, dense.inputs) or dense.inputs != width:
        problem = f"has shape {list(weight.shape)}, not {[dense.outputs, width]}"
        raise CheckpointError(f"{path}: linear.weight {problem}")
    return DenseLayer(weight, None if bias is None else _bias(bias), dense.activation)


def _bias(bias: torch.Tensor) -> torch.Tensor:
    return bias.float()
