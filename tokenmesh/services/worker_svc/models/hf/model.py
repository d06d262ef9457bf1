"""HfModel: a module tree of transformers with weights, as the runner sees it."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from tokenmesh.services.worker_svc.layers.step import Step
from tokenmesh.services.worker_svc.models.api import Patch, Progress
from tokenmesh.services.worker_svc.models.hf.facts import HfFacts
from tokenmesh.services.worker_svc.models.hf.tree import Tree, adapt
from tokenmesh.services.worker_svc.models.hf.weights import read_weights
from tokenmesh.services.worker_svc.models.keeps import KvStore, LayerKeeps


@dataclass(frozen=True, slots=True)
class HfModel:
    """Implements `Model`."""

    facts: HfFacts
    keeps: tuple[LayerKeeps, ...]
    tree: Tree
    body: "_Computed"

    @property
    def dtype(self) -> torch.dtype:
        """See `Model.dtype`."""
        return self.tree.model.dtype

    @property
    def has_program(self) -> bool:
        """See `Model.has_program`."""
        return False

    def embed(self, token_ids: torch.Tensor, patches: Sequence[Patch] = ()) -> torch.Tensor:
        """See `Model.embed`; a multiplier that the embedding module itself has is in it."""
        hidden: torch.Tensor = self.tree.embedding(token_ids)
        for tokens, values in patches:
            hidden[tokens] = values.to(hidden.dtype)
        return hidden

    def forward(self, hidden: torch.Tensor, step: Step, store: KvStore) -> torch.Tensor:
        """See `Model.forward`."""
        self.tree.run.begin(step, store)
        try:
            return self.tree.hidden_of(hidden[None], step.positions[None])[0]
        finally:
            self.tree.run.end()

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Model.logits`; by the tree's own head, with all that it does to logits."""
        self.body.hidden = hidden[None]
        logits: torch.Tensor = self.tree.model(inputs_embeds=hidden[None], use_cache=False).logits[
            0
        ]
        self.body.hidden = None
        return logits.float() if out is None else out.copy_(logits)


class _Computed(torch.nn.Module):
    """Stands where the tree's body was, so that its head runs on states that are there."""

    hidden: torch.Tensor | None

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.hidden = None
        self.__dict__["_body"] = body  # not a submodule

    def __getattr__(self, name: str) -> Any:
        """Heads read a few numbers off the body."""
        return getattr(self.__dict__["_body"], name)

    def forward(self, *_args: Any, **_named: Any) -> Any:
        """As if the body had computed `hidden`."""
        nothing = dict.fromkeys(("past_key_values", "hidden_states", "attentions", "router_logits"))
        return _Output(last_hidden_state=self.hidden, cache_params=None, **nothing)


class _Output(SimpleNamespace):
    """A body's output by name or by number."""

    def __getitem__(self, index: int) -> Any:
        return (self.last_hidden_state,)[index]


def build_hf(facts: HfFacts, dtype: torch.dtype, progress: Progress) -> HfModel:
    """Load every tensor. Raises CheckpointError for any that is missing, misshapen or unknown."""
    model = read_weights(facts, dtype, progress)
    tree = adapt(model, facts.ropes)
    keeps = tree.probe()
    body = _Computed(tree.body)
    setattr(model, model.base_model_prefix, body)
    return HfModel(facts, keeps, tree, body)
