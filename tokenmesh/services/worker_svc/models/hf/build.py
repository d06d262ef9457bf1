"""Checkpoint -> a model of the general kind: as a native decoder where it can be read as one."""

import logging

import torch

from tokenmesh.services.worker_svc.layers.step import HostStep
from tokenmesh.services.worker_svc.models.api import Model, Progress
from tokenmesh.services.worker_svc.models.checkpoint import Checkpoint
from tokenmesh.services.worker_svc.models.hf import experts
from tokenmesh.services.worker_svc.models.hf.calls import Calls, first_step, record
from tokenmesh.services.worker_svc.models.hf.check import check, paged_logits, prompts, reference
from tokenmesh.services.worker_svc.models.hf.facts import HfFacts
from tokenmesh.services.worker_svc.models.hf.mixers import FORMS
from tokenmesh.services.worker_svc.models.hf.model import Computed, HfModel
from tokenmesh.services.worker_svc.models.hf.swap import swap
from tokenmesh.services.worker_svc.models.hf.tree import adapt
from tokenmesh.services.worker_svc.models.hf.unserved import UnservedModel
from tokenmesh.services.worker_svc.models.hf.weights import read_weights
from tokenmesh.services.worker_svc.models.keeps import KvStore, make_store
from tokenmesh.services.worker_svc.models.native.decoder import Decoder
from tokenmesh.services.worker_svc.models.promotion.promote import promote
from tokenmesh.services.worker_svc.models.promotion.read_heads import Unread
from tokenmesh.shared.errors import CheckpointError

logger = logging.getLogger(__name__)


def build_hf(
    facts: HfFacts,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    progress: Progress,
    has_kernels: bool,
) -> Model:
    """Load every tensor. has_kernels: the C kernels have been started.

    Raises CheckpointError for a tensor that is missing, misshapen or unknown, for a tree that
    computes something else in chunks than it does as a whole, and for one whose code fails.
    """

    def read() -> tuple[HfModel, torch.Tensor]:
        return read_tree(facts, checkpoint, dtype, progress)

    try:
        model, expected = read()
        promoted = _as_decoder(model, expected, has_kernels)
        if promoted is not None:
            return promoted
        if not model.is_whole:
            model, expected = read()
        return _as_tree(model, expected, has_kernels)
    except UnservedModel as error:
        raise CheckpointError(f"{facts.architecture} cannot be served: {error.message}") from error
    except (CheckpointError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model class raises about what it is given
        what = f"its code fails: {type(error).__name__}: {error}"
        raise CheckpointError(f"{facts.architecture} cannot be served: {what}") from error


def _as_decoder(model: HfModel, expected: torch.Tensor, has_kernels: bool) -> Decoder | None:
    """The same weights as a native decoder; None where it is not one."""
    name = model.facts.architecture
    try:
        promoted = promote(model, has_kernels)
    except Unread as error:
        logger.info("%s stays a module tree: %s", name, error)
        return None
    model.is_whole = False
    try:
        _check(promoted, expected)
    except UnservedModel as error:
        logger.warning("%s as a native decoder: %s", name, error.message)
        return None
    logger.info("%s runs as a native decoder", name)
    return promoted


def _as_tree(model: HfModel, expected: torch.Tensor, has_kernels: bool) -> HfModel:
    """With the parts replaced that ours are faster than. Raises UnservedModel."""
    experts.take_over(model.tree.body, has_kernels)
    modules = [*model.tree.body.modules(), *model.tree.model.modules()]
    swap(modules, _record(model, modules), has_kernels)
    mixers = model.tree.mixers
    for form in FORMS if mixers else FORMS[:1]:
        for port in mixers:
            port.take_form(form)
        try:
            _check(model, expected)
        except UnservedModel as error:
            if not mixers or form == FORMS[-1]:
                raise
            logger.info("mixers of %s %s: %s", model.facts.architecture, form, error.message)
        else:
            break
    return model


@torch.inference_mode()
def _record(model: HfModel, modules: list[torch.nn.Module]) -> Calls:
    """The calls of one pass over a few tokens, the head included."""
    step = first_step()
    store = make_store(model.keeps, 3, step.page_size, 1, model.dtype, torch.device("cpu"))
    store.clear_blocks(torch.arange(3))
    ids = prompts(model.facts.vocab_size)[0][: len(step.token_lengths)]
    return record(modules, lambda: model.logits(model.forward(model.embed(ids), step, store)))


def read_tree(
    facts: HfFacts, checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress
) -> tuple[HfModel, torch.Tensor]:
    """The tree over our memory, and the logits that it has to come to."""
    model = read_weights(facts, checkpoint, dtype, progress)
    expected = reference(model, facts.vocab_size)
    tree = adapt(model, facts.ropes)
    body = Computed(tree.body)
    keeps = tree.probe()
    setattr(model, model.base_model_prefix, body)
    return HfModel(facts, keeps, tree, body), expected


def _check(model: Model, expected: torch.Tensor) -> None:
    """See `check`."""

    def logits(ids: torch.Tensor, step: HostStep, store: KvStore) -> torch.Tensor:
        return model.logits(model.forward(model.embed(ids), step, store))

    with torch.inference_mode():
        ours = paged_logits(logits, model.keeps, model.facts.vocab_size, model.dtype)
    error = check(expected, ours, model.dtype)
    logger.info("chunks of %s are %.1e from the whole", model.facts.architecture, error)
