"""make_head: what a checkpoint has behind its body, as a PoolHead."""

from typing import Any, Final

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.pooling.facts import EMBEDDINGS, PoolingFacts
from tokenmesh.engine.models.pooling.heads import (
    DenseLayer,
    EachTokenLogits,
    LabelHead,
    PoolHead,
    TokenLogits,
    VectorHead,
)
from tokenmesh.engine.models.pooling.kind import (
    COLBERT,
    COLQWEN2,
    PROJECTION,
    modules_of,
)
from tokenmesh.engine.models.pooling.modules import (
    NORMALIZE,
    Dense,
    LogitScore,
    SentenceModules,
)
from tokenmesh.engine.models.tree.facts import HfFacts
from tokenmesh.engine.models.tree.model import Computed
from tokenmesh.engine.models.tree.part import TreePart
from tokenmesh.engine.models.tree.pooling.classifier import activation_of, label_head
from tokenmesh.shared.errors import CheckpointError

_SAME: Final = 1e-2
_ZERO: Final = 1e-4


def make_head(
    facts: HfFacts,
    pooling: PoolingFacts,
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    part: TreePart | None = None,
) -> PoolHead:
    """Raises CheckpointError for modules that do not fit the model.

    A classifier's body is taken out of the tree. part: what of the tree this rank has.
    """
    modules = modules_of(facts.directory, pooling.is_causal, pooling.pooling_type)
    if modules.score is not None:
        return _logit_head(modules.score, facts, pooling, model, part)
    if not set(pooling.tasks) & EMBEDDINGS:
        return label_head(facts, pooling, model)
    if facts.architecture == COLQWEN2:
        layer: Any = model.embedding_proj_layer
        weight, bias = layer.weight.detach().float(), layer.bias.detach().float()
        return VectorHead((), (DenseLayer(weight, bias, "Identity"),), normalizes=True)
    if facts.architecture == COLBERT:
        shape = (pooling.size, facts.hidden_size)
        weight = checkpoint.take(PROJECTION, shape, torch.float32)
        return VectorHead((), (DenseLayer(weight, None, "Identity"),), normalizes=True)
    return _vector_head(modules, facts, model.device)


def _vector_head(modules: SentenceModules, facts: HfFacts, device: torch.device) -> VectorHead:
    layers: list[DenseLayer] = []
    width = facts.hidden_size * max(1, len(modules.takes))
    for step in modules.steps:
        if isinstance(step, Dense):
            layers.append(_layer(step, width, device))
            width = step.outputs
    # PyLate normalizes token embeddings without a module that says so
    normalizes = NORMALIZE in modules.steps or not modules.takes
    return VectorHead(modules.takes, tuple(layers), normalizes)


def _layer(dense: Dense, width: int, device: torch.device) -> DenseLayer:
    path = dense.directory / "model.safetensors"
    if not path.exists():
        raise CheckpointError(f"{dense.directory}: holds no model.safetensors")
    tensors: dict[str, Any] = load_file(path)
    names = {"linear.weight", "linear.bias"} if dense.has_bias else {"linear.weight"}
    if set(tensors) != names:
        raise CheckpointError(f"{path}: holds {sorted(tensors)}, not {sorted(names)}")
    tensors = {name: each.to(device) for name, each in tensors.items()}
    weight, bias = tensors["linear.weight"].float(), tensors.get("linear.bias")
    if tuple(weight.shape) != (dense.outputs, dense.inputs) or dense.inputs != width:
        problem = f"has shape {list(weight.shape)}, not {[dense.outputs, width]}"
        raise CheckpointError(f"{path}: linear.weight {problem}")
    return DenseLayer(weight, None if bias is None else bias.float(), dense.activation)


def _logit_head(
    score: LogitScore,
    facts: HfFacts,
    pooling: PoolingFacts,
    model: PreTrainedModel,
    part: TreePart | None,
) -> LabelHead:
    """The decoder's own logits of one or two tokens, behind the last token of the prompt."""
    ids = [score.true_id] if score.false_id is None else [score.true_id, score.false_id]
    if max(ids) >= facts.vocab_size:
        raise CheckpointError(
            f"{facts.directory}: LogitScore has the id {max(ids)}; the model has {facts.vocab_size}"
        )
    table: Any = model.get_output_embeddings()
    weight = _rows_of(table.weight.detach(), ids, part)
    if len(ids) == 2:
        weight = weight[:1] - weight[1:]
    _check_plain(model, table.weight)
    return LabelHead(
        ("lasttoken",),
        TokenLogits(weight),
        activation_of(facts.config, pooling),
        of_each=EachTokenLogits(weight),
    )


def _rows_of(table: torch.Tensor, ids: list[int], part: TreePart | None) -> torch.Tensor:
    """Rows of a head, float32 [N, H]; of one that is divided, each rank has some."""
    if part is None:
        return table[torch.tensor(ids)].float()
    own = part.ranks.padded_part(part.whole.vocab_size)
    rows = table.new_zeros(len(ids), table.shape[1], dtype=torch.float32)
    for number, each in enumerate(ids):
        if own.start <= each < own.stop:
            rows[number] = table[each - own.start]
    return part.ranks.sum_(rows)


def _check_plain(model: PreTrainedModel, table: torch.Tensor) -> None:
    """Raise CheckpointError where the model's logits are more than products with its table.

    A bias, a multiplier or a cap changes scores.
    """
    body: Any = model.base_model
    # zeros show a bias, large numbers a cap
    states = torch.randn((1, 2, table.shape[1]), generator=torch.Generator().manual_seed(0))
    states = (states * torch.tensor([[0.0], [100.0]])).to(table.device, table.dtype)
    setattr(model, model.base_model_prefix, Computed(body))
    try:
        logits = model(inputs_embeds=states).logits
    finally:
        setattr(model, model.base_model_prefix, body)
    products = torch.nn.functional.linear(states, table)
    if not torch.allclose(logits.float(), products.float(), rtol=_SAME, atol=_ZERO):
        problem = "whose logits are not plain products of its states is not supported"
        raise CheckpointError(f"LogitScore of a model {problem}", param="modules.json")
