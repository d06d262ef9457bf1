"""PoolHead: from the states of prompts to the numbers that answer them.

take -> head -> activation -> normalize -> slice. What is taken comes from `take`; a head is what a
checkpoint has behind it: Dense modules of sentence-transformers, or a classifier.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import torch

from tokenmesh.engine.adapters.sites import HeadSite
from tokenmesh.engine.api.pooling import PoolingParams
from tokenmesh.engine.models.pooling.facts import PER_TOKEN
from tokenmesh.engine.models.pooling.take import finished, joined, part_of, taken
from tokenmesh.kernels.lora import HeadChange

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: Final[dict[str, Activation]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": torch.nn.functional.gelu,
    "SiLU": torch.nn.functional.silu,
    "Sigmoid": torch.sigmoid,
    "Softmax": lambda x: torch.softmax(x, dim=-1),
}
"""By the name of the class of `torch.nn`."""


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """activation(x @ weight.T + bias)."""

    weight: torch.Tensor
    """float32 [O, I]"""
    bias: torch.Tensor | None
    activation: str

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., I] -> [..., O]."""
        return ACTIVATIONS[self.activation](torch.nn.functional.linear(x, self.weight, self.bias))


@dataclass(frozen=True, slots=True)
class VectorHead:
    """Embeddings: of what is taken of a prompt, or of each token."""

    takes: tuple[str, ...]
    layers: tuple[DenseLayer, ...] = ()
    normalizes: bool = True
    """It tells whether the model's embeddings have length 1."""

    def of_states(self, states: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """Return the numbers of whole prompts: float32 [N, n, H] -> [N, size], or [N, n, size] of
        each token.
        """
        if params.task in PER_TOKEN:
            return self.of_taken(states, params)
        return self.of_taken(taken(self.takes, states), params)

    def of_taken(self, vectors: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """Return the numbers of what was taken: [N, takes * H] -> [N, size]."""
        for layer in self.layers:
            vectors = layer(vectors)
        if params.dimensions is not None:
            vectors = vectors[..., : params.dimensions]
        normalizes = params.use_activation
        if self.normalizes if normalizes is None else normalizes:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        return vectors


class Logits(Protocol):
    """It holds what a classifier computes of states, and the parameters that it does so with."""

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Those that adapters may change, by their names in the tree."""

    @property
    def linear_weights(self) -> Set[str]:
        """Names of the parameters that are weights of linear layers."""

    def replacing(self, parameters: Mapping[str, torch.Tensor]) -> "Logits":
        """The same with other values of some parameters."""

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """States [N, n, H] -> [N, labels], or [N, n, labels] of a classifier of tokens."""


@dataclass(frozen=True, slots=True)
class TokenLogits:
    """Products of the last token's state with rows of a decoder's head. Implements `Logits`."""

    weight: torch.Tensor
    """float32 [O, H]"""
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    linear_weights: Set[str] = frozenset()

    def replacing(self, parameters: Mapping[str, torch.Tensor]) -> "TokenLogits":
        raise AssertionError("it has no parameters that adapters may change")

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(states[:, -1].float(), self.weight)


class EachTokenLogits(TokenLogits):
    """The same of every token's state."""

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(states.float(), self.weight)


@dataclass(frozen=True, slots=True)
class LabelHead:
    """Scores of labels, of a prompt or of each token."""

    takes: tuple[str, ...]
    """The one token whose state the classifier reads; empty: it reads all of them."""
    logits: Logits
    activation: str
    of_each: Logits | None = None
    """Scores of every token, by a classifier that was not made for tokens; None: it has none."""

    def changed(self, changes: Mapping[str, HeadChange]) -> "LabelHead":
        """The same with what an adapter does to its parameters, by name."""
        own = self.logits.parameters
        values = {name: change.of(own[name]) for name, change in changes.items()}
        each = None if self.of_each is None else self.of_each.replacing(values)
        return replace(self, logits=self.logits.replacing(values), of_each=each)

    def of_states(self, states: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """Return the logits of whole prompts: float32 [N, n, H] -> [N, labels], or [N, n, labels]
        of each token.
        """
        each = self.of_each if params.task in PER_TOKEN else None
        if self.takes and each is None:
            return self.of_taken(taken(self.takes, states), params)
        logits = (each or self.logits)(states).float()
        return logits if params.use_activation is False else ACTIVATIONS[self.activation](logits)

    def of_taken(self, vectors: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """Return the logits of the state [N, H] that the classifier reads -> [N, labels]."""
        logits = self.logits(vectors[:, None]).float()
        return logits if params.use_activation is False else ACTIVATIONS[self.activation](logits)


PoolHead = VectorHead | LabelHead


def head_sites(head: PoolHead) -> dict[str, HeadSite]:
    """Return what adapters may change of a head, by the names of its parameters."""
    if isinstance(head, VectorHead):
        return {}
    weights = head.logits.linear_weights
    return {
        name: HeadSite(name, tuple(each.shape), name in weights)
        for name, each in head.logits.parameters.items()
    }


class Kept:
    """It holds what is kept of the chunks of a prompt that takes several steps."""

    def __init__(self, head: PoolHead, params: PoolingParams) -> None:
        self._head = head
        self._params = params
        self._takes = () if params.task in PER_TOKEN else head.takes
        self._parts: list[torch.Tensor] = []
        """For each of what is taken its part so far; else all states, in the host's memory."""
        self._device = torch.device("cpu")
        self._length = 0

    def add(self, states: torch.Tensor) -> None:
        """The states of the next chunk, float32 [1, n, H]."""
        self._device = states.device
        parts = [part_of(each, states, self._length) for each in self._takes]
        if not self._takes:
            self._parts.append(states.cpu())
        elif self._parts:
            each = zip(self._takes, self._parts, parts, strict=True)
            self._parts = [joined(*three) for three in each]
        else:
            self._parts = [part.clone() for part in parts]
        self._length += states.shape[1]

    def numbers(self) -> torch.Tensor:
        """Return the numbers of the whole prompt: [1, size] or [1, n, size]."""
        if not self._takes:
            whole = torch.cat(self._parts, dim=1).to(self._device)
            return self._head.of_states(whole, self._params)
        each = zip(self._takes, self._parts, strict=True)
        found = [finished(take, part, self._length) for take, part in each]
        return self._head.of_taken(torch.cat(found, dim=-1), self._params)
