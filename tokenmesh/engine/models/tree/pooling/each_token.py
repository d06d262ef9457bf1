"""EachTokenClassifier: scores of each token by a classifier that was made for sequences."""

from collections.abc import Mapping
from typing import Final, Self

import torch
from torch.func import functional_call
from transformers import PreTrainedModel

_LAST_PARTS: Final = ("classifier", "score")
"""Names of the module that makes logits, behind what is done to the one state that is read."""


class EachTokenClassifier:
    """The last part of a tree's classifier on the state of each token. Implements `Logits`.

    Like vLLM's, it leaves out what a body or a tree does to the one state before (a pooler).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        replaced: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._model = model
        self._name = name
        self._replaced = replaced or {}
        self.linear_weights: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: PreTrainedModel, states: torch.Tensor, size: int) -> Self | None:
        """None where no such part takes one state; states: any [N, n, H]."""
        for name in _LAST_PARTS:
            if isinstance(getattr(model, name, None), torch.nn.Module):
                found = cls(model, name)
                try:
                    shape = found(states).shape
                except Exception:  # whatever a module raises about what it is given
                    return None
                return found if tuple(shape) == (*states.shape[:2], size) else None
        return None

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        return {}

    def replacing(self, parameters: Mapping[str, torch.Tensor]) -> "EachTokenClassifier":
        return EachTokenClassifier(self._model, self._name, parameters)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        part, start = getattr(self._model, self._name), f"{self._name}."
        own = {
            name.removeprefix(start): each
            for name, each in self._replaced.items()
            if name.startswith(start)
        }
        # heads like RoBERTa's read the first of several states
        alone = states.to(self._model.dtype).flatten(0, 1)[:, None]
        logits: torch.Tensor = functional_call(part, own, (alone,))
        return logits.reshape(*states.shape[:2], -1)
