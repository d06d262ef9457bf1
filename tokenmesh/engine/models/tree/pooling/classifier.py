"""A tree's own classifier, run on states that are there: of sequences, or of tokens."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.func import functional_call
from transformers import PreTrainedModel

from tokenmesh.engine.models.pooling.facts import PoolingFacts
from tokenmesh.engine.models.pooling.heads import ACTIVATIONS, LabelHead
from tokenmesh.engine.models.tree.facts import HfFacts
from tokenmesh.engine.models.tree.model import Computed
from tokenmesh.engine.models.tree.pooling.each_token import EachTokenClassifier
from tokenmesh.engine.models.tree.run import UnservedModel

_TOKENS: Final = 5
_ROWS: Final = 2
_SAME: Final = 1e-5
_BY_PROBLEM: Final = {
    "regression": "Identity",
    "single_label_classification": "Softmax",
    "multi_label_classification": "Sigmoid",
}


class TreeClassifier:
    """Everything of a tree but its body, whose parameters may be replaced. Implements `Logits`."""

    def __init__(
        self, model: PreTrainedModel, replaced: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """model: its body was taken out; replaced: parameters that count instead of its own."""
        self._model = model
        self._replaced = replaced
        linears = [name for name, each in model.named_modules() if type(each) is torch.nn.Linear]
        self.linear_weights = frozenset(f"{name}.weight" for name in linears)

    @classmethod
    def of(cls, model: PreTrainedModel) -> "TreeClassifier":
        """Put a `Computed` in the place of the model's body."""
        body = Computed(model.base_model)
        setattr(model, model.base_model_prefix, body)
        text = model.config.get_text_config()
        if text.pad_token_id is None:
            text.pad_token_id = 0  # batches have no padding, but are refused without one
        return cls(model)

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        return dict(self._model.named_parameters())

    def replacing(self, parameters: Mapping[str, torch.Tensor]) -> "TreeClassifier":
        return TreeClassifier(self._model, parameters)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        named = {"inputs_embeds": states.to(self._model.dtype)}
        if self._replaced is None:
            logits: torch.Tensor = self._model(**named).logits
        else:
            logits = functional_call(self._model, dict(self._replaced), (), named).logits
        return logits


def label_head(facts: HfFacts, pooling: PoolingFacts, model: PreTrainedModel) -> LabelHead:
    """Return the head of a tree with a classifier, whose body is taken out.

    Raises UnservedModel.
    """
    classifier = TreeClassifier.of(model)
    per_token = pooling.labels_tokens
    states = torch.randn(
        _ROWS, _TOKENS, facts.hidden_size, generator=torch.Generator().manual_seed(0)
    ).to(model.device)
    try:
        logits = classifier(states)
    except Exception as error:  # whatever a model class raises about what it is given
        raise UnservedModel(f"its classifier fails on states alone: {error}") from error
    shape = (_ROWS, _TOKENS, pooling.size) if per_token else (_ROWS, pooling.size)
    if tuple(logits.shape) != shape:
        raise UnservedModel(f"its classifier gives {list(logits.shape)}, not {list(shape)}")
    takes = () if per_token else _takes(classifier, states, logits)
    each = None if per_token else EachTokenClassifier.of(model, states, pooling.size)
    return LabelHead(takes, classifier, activation_of(facts.config, pooling), each)


def _takes(
    classifier: TreeClassifier, states: torch.Tensor, expected: torch.Tensor
) -> tuple[str, ...]:
    """The one token that is enough for its logits; empty: it needs all of them."""
    for take, alone in (("cls", states[:, :1]), ("lasttoken", states[:, -1:])):
        found = classifier(alone)
        if found.shape == expected.shape and torch.allclose(found, expected, atol=_SAME):
            return (take,)
    return ()


def activation_of(config: Any, pooling: PoolingFacts) -> str:
    """Return what makes scores of logits: as the checkpoint says, else by the number of labels.

    Raises UnservedModel for an activation that is not known.
    """
    stated = getattr(config, "sentence_transformers", None) or {}
    name = stated.get("activation_fn") or getattr(
        config, "sbert_ce_default_activation_function", None
    )
    if name is not None:
        activation = str(name).rpartition(".")[2]
        if not str(name).startswith("torch.nn.") or activation not in ACTIVATIONS:
            raise UnservedModel(f"its activation is {name!r}, which is not supported")
        return activation
    if not pooling.labels_tokens and config.problem_type in _BY_PROBLEM:
        return _BY_PROBLEM[config.problem_type]
    return "Sigmoid" if pooling.size == 1 else "Softmax"
