"""HfModel: a module tree of transformers with weights, as the runner sees it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel

from tokenmesh.services.worker_svc.layers.step import HostStep, Step
from tokenmesh.services.worker_svc.models.api import Patch, Progress
from tokenmesh.services.worker_svc.models.checkpoint import Checkpoint
from tokenmesh.services.worker_svc.models.hf import experts
from tokenmesh.services.worker_svc.models.hf.calls import Calls, first_step, record
from tokenmesh.services.worker_svc.models.hf.check import check, paged_logits, prompts, reference
from tokenmesh.services.worker_svc.models.hf.facts import HfFacts
from tokenmesh.services.worker_svc.models.hf.mixers import FORMS
from tokenmesh.services.worker_svc.models.hf.swap import swap
from tokenmesh.services.worker_svc.models.hf.tree import Tree, adapt
from tokenmesh.services.worker_svc.models.hf.unserved import UnservedModel
from tokenmesh.services.worker_svc.models.hf.weights import read_weights
from tokenmesh.services.worker_svc.models.keeps import (
    Grouping,
    KvStore,
    LayerKeeps,
    make_store,
    window_groups,
)
from tokenmesh.shared.errors import CheckpointError

logger = logging.getLogger(__name__)


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
        dtype: torch.dtype = self.tree.model.dtype
        return dtype

    @property
    def grouping(self) -> Grouping:
        """See `Model.grouping`."""
        return window_groups(self.keeps)

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
        logits: torch.Tensor = self.tree.model(inputs_embeds=hidden[None], use_cache=False).logits
        self.body.hidden = None
        return logits[0].float() if out is None else out.copy_(logits[0])


class _Computed(torch.nn.Module):
    """Stands where the tree's body was, so that its head runs on states that are there."""

    hidden: torch.Tensor | None

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.hidden = None
        self.__dict__["_body"] = body  # not a submodule

    def __getattr__(self, name: str) -> Any:
        """Heads read a few numbers off the body; some ask for a body within it."""
        found = getattr(self.__dict__["_body"], name)
        return self if isinstance(found, PreTrainedModel) else found

    def forward(self, *_args: Any, **_named: Any) -> Any:
        """As if the body had computed `hidden`."""
        return _Output(last_hidden_state=self.hidden)


class _Output(SimpleNamespace):
    """A body's output by name or by number; None for all that a head may pass on."""

    def __getitem__(self, index: int) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def build_hf(
    facts: HfFacts,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    progress: Progress,
    has_kernels: bool,
) -> HfModel:
    """Load every tensor. has_kernels: the C kernels have been started.

    Raises CheckpointError for a tensor that is missing, misshapen or unknown, for a tree that
    computes something else in chunks than it does as a whole, and for one whose code fails.
    """
    model = read_weights(facts, checkpoint, dtype, progress)
    try:
        return _adapted(facts, model, has_kernels)
    except UnservedModel as error:
        raise CheckpointError(f"{facts.architecture} cannot be served: {error.message}") from error
    except (CheckpointError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model class raises about what it is given
        what = f"its code fails: {type(error).__name__}: {error}"
        raise CheckpointError(f"{facts.architecture} cannot be served: {what}") from error


def _adapted(facts: HfFacts, model: PreTrainedModel, has_kernels: bool) -> HfModel:
    expected = reference(model, facts.vocab_size)
    tree = adapt(model, facts.ropes)
    experts.take_over(model, has_kernels)
    body = _Computed(tree.body)
    keeps = tree.probe()
    setattr(model, model.base_model_prefix, body)
    loaded = HfModel(facts, keeps, tree, body)
    modules = [*tree.body.modules(), *model.modules()]
    swap(modules, _record(loaded, modules), has_kernels)
    _check(loaded, expected)
    return loaded


@torch.inference_mode()
def _record(model: HfModel, modules: list[torch.nn.Module]) -> Calls:
    """The calls of one pass over a few tokens, the head included."""
    step = first_step()
    store = make_store(model.keeps, 3, step.page_size, 1, model.dtype, torch.device("cpu"))
    store.clear_blocks(torch.arange(3))
    ids = prompts(model.facts.vocab_size)[0][: len(step.token_lengths)]
    return record(modules, lambda: model.logits(model.forward(model.embed(ids), step, store)))


def _check(model: HfModel, expected: torch.Tensor) -> None:
    """See `check`. Mixers that come out wrong in one form are tried in the next slower one."""

    def logits(ids: torch.Tensor, step: HostStep, store: KvStore) -> torch.Tensor:
        return model.logits(model.forward(model.embed(ids), step, store))

    name, mixers = model.facts.architecture, model.tree.mixers
    for form in FORMS if mixers else FORMS[:1]:
        for port in mixers:
            port.take_form(form)
        try:
            ours = paged_logits(logits, model.keeps, model.facts.vocab_size, model.dtype)
            error = check(expected, ours, model.dtype)
        except UnservedModel as unserved:
            if not mixers or form == FORMS[-1]:
                raise
            logger.info("the mixers of %s %s: %s", name, form, unserved.message)
        else:
            logger.info("chunks of %s are %.1e from the whole", name, error)
            return
