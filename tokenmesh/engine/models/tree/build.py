"""Checkpoint -> a model of the general kind: as a native decoder where it can be read as one."""

import logging
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import torch

from tokenmesh.engine.layers.step import Step
from tokenmesh.engine.media_facts import TEXT_ONLY
from tokenmesh.engine.models.api import LanguageModel, Progress
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.kv_store import KvStore, make_store
from tokenmesh.engine.models.native.decoder import Decoder
from tokenmesh.engine.models.promotion.promote import promote
from tokenmesh.engine.models.promotion.read_heads import Unread
from tokenmesh.engine.models.tree import experts
from tokenmesh.engine.models.tree.adapter_sites import (
    add_sites,
    former_names,
    site_problems,
)
from tokenmesh.engine.models.tree.check import (
    Compute,
    Reference,
    check,
    paged_results,
    prompts,
    reference,
)
from tokenmesh.engine.models.tree.embedding_factor import embedding_factor
from tokenmesh.engine.models.tree.expert_slots import slots_of
from tokenmesh.engine.models.tree.facts import HfFacts
from tokenmesh.engine.models.tree.media.cross import (
    states_for_check,
    take_alignment_heads,
)
from tokenmesh.engine.models.tree.media.language import stand_in
from tokenmesh.engine.models.tree.mixers import FORMS, in_fastest_form
from tokenmesh.engine.models.tree.model import Computed, HfModel
from tokenmesh.engine.models.tree.part import TreePart
from tokenmesh.engine.models.tree.part_sums import join
from tokenmesh.engine.models.tree.quantized.deferred_experts import DeferredExperts
from tokenmesh.engine.models.tree.quantized.offers import experts_to_defer, offer_codes
from tokenmesh.engine.models.tree.recognise import (
    FIRST_PAGE,
    FIRST_TOKENS,
    Calls,
    first_step,
    record,
)
from tokenmesh.engine.models.tree.run import UnservedModel
from tokenmesh.engine.models.tree.swap import swap
from tokenmesh.engine.models.tree.tree import adapt
from tokenmesh.engine.models.tree.waits import Waits
from tokenmesh.engine.models.tree.weights import read_weights
from tokenmesh.engine.ranks.ranks import ALONE, Ranks
from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.shared.errors import CheckpointError, ConfigError
from tokenmesh.shared.lean_import import without_compiler

logger = logging.getLogger(__name__)


@without_compiler()
def build_hf(
    facts: HfFacts,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    progress: Progress,
    has_kernels: bool,
    ranks: Ranks = ALONE,
) -> LanguageModel:
    """Load every tensor, or the parts of this rank. has_kernels: the C kernels have been started.

    Raises CheckpointError for a tensor that is missing, misshapen or unknown, for a tree that
    computes something else in chunks than it does as a whole, and for one whose code fails.
    """

    def read() -> tuple[HfModel, Reference]:
        return read_tree(facts, checkpoint, dtype, progress, deferred, part)

    part = None if ranks.world == 1 else TreePart(facts, ranks)
    try:
        own = facts if part is None else part.facts
        deferred = experts_to_defer(own, checkpoint, dtype, has_kernels)
        model, expected = read()
        promoted = None
        if not model.tree.crosses and facts.media == TEXT_ONLY:
            promoted = _as_decoder(model, expected, has_kernels)
        if promoted is not None:
            return promoted
        if not model.is_whole:
            model, expected = read()
        replace_parts(model, expected, has_kernels)
    except UnservedModel as error:
        raise CheckpointError(f"{facts.architecture} cannot be served: {error.message}") from error
    except (CheckpointError, ConfigError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model class raises about what it is given
        what = f"its code fails: {type(error).__name__}: {error}"
        raise CheckpointError(f"{facts.architecture} cannot be served: {what}") from error
    if model.device.type != "cpu" and not model.takes_graphs:
        why = model.waits_for or "its indexer, which goes from row to row"
        logger.warning("%s decodes without CUDA graphs: %s", facts.architecture, why)
    return model


def _as_decoder(model: HfModel, expected: Reference, has_kernels: bool) -> Decoder | None:
    """The same weights as a native decoder; None where it is not one."""
    name = model.facts.architecture
    try:
        promoted = promote(model, has_kernels)
    except Unread as error:
        logger.info("%s stays a module tree: %s", name, error)
        return None
    model.is_whole = False
    try:
        _check(promoted, partial(_logits, promoted), expected, model.ranks)
    except UnservedModel as error:
        logger.warning("%s as a native decoder: %s", name, error.message)
        return None
    logger.info("%s runs as a native decoder", name)
    return promoted


def replace_parts(model: HfModel, expected: Reference, has_kernels: bool) -> None:
    """Replace the parts of a tree that ours are faster than, and check it in the fastest form.

    Raises UnservedModel.
    """
    tree, on_gpu = model.tree, uses_triton(expected.results)
    # the others go from row to row on the host
    forms = FORMS if tree.mixers and not on_gpu else FORMS[:1]
    if on_gpu:
        for port in tree.mixers:
            port.take_form(forms[0])
    with model.ranks.alone():
        experts.take_over(tree.body, has_kernels)
        model.expert_slots = slots_of(tree.body.modules())
        for slots in model.expert_slots:
            slots.add_spare()
        modules = list(dict.fromkeys((*tree.body.modules(), *tree.model.modules())))
        calls = _record(model, modules)
        problems = site_problems(tree.body, [*tree.mixers, *tree.indexers], calls)
        swap(modules, calls, has_kernels)
    model.sites.former = former_names(model.sites_prefix)
    add_sites(model.sites, tree.body, model.sites_prefix, problems)
    check_form = partial(_check, model, model.results, expected, model.ranks)
    model.waits_for = in_fastest_form(tree.mixers, forms, check_form)


@torch.inference_mode()
def _record(model: HfModel, modules: list[torch.nn.Module]) -> Calls:
    """The calls of one pass over a few tokens, with what is behind the states."""
    step = first_step(model.device)
    store = make_store(model.keeps, 3, FIRST_PAGE, 1, model.dtype, model.device)
    store.clear_blocks(torch.arange(3, device=model.device))
    if model.write_cross is not None:
        model.write_cross(states_for_check(model.facts, model.dtype, model.device)[0], store, 0)
    ids = prompts(model.facts.vocab_size, model.device)[0][:FIRST_TOKENS]
    return record(modules, lambda: model.results(ids, step, store))


def read_tree(
    facts: HfFacts,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    progress: Progress,
    deferred: Mapping[str, DeferredExperts] = MappingProxyType({}),
    part: TreePart | None = None,
) -> tuple[HfModel, Reference]:
    """The tree over our memory, and the logits that it has to come to."""
    own, ranks = (facts, ALONE) if part is None else (part.facts, part.ranks)
    model = read_weights(own, checkpoint, dtype, progress, deferred=deferred, part=part)
    if part is not None:
        join(model, part)
    cuts = {} if part is None else part.cuts(checkpoint.shapes())
    offer_codes(model, checkpoint, facts, cuts)
    states = states_for_check(facts, dtype, model.device)
    factor = embedding_factor(model, prompts(facts.vocab_size, model.device)[0], states)
    expected = reference(model, facts.vocab_size, states, factor, ranks)
    tree = adapt(model, facts.ropes)
    tree.embedding_factor = factor
    take_alignment_heads(tree.crosses, tree.run, facts.directory, facts.config)
    body = Computed(tree.body)
    with ranks.alone():
        keeps = tree.probe()
    stand_in(model, tree.body, body)
    return HfModel(facts, keeps, tree, body, ranks=ranks), expected


def _logits(model: Decoder, ids: torch.Tensor, step: Step, store: KvStore) -> torch.Tensor:
    return model.logits(model.forward(model.embed(ids), step, store))


@torch.inference_mode()
def _check(
    model: HfModel | Decoder, compute: Compute, expected: Reference, ranks: Ranks = ALONE
) -> str | None:
    """See `check`; an operation that would wait for a GPU, if there is one."""
    waits, device = Waits(), expected.results.device

    def watched(ids: torch.Tensor, step: Step, store: KvStore) -> torch.Tensor:
        with waits.watching():
            return compute(ids, step, store)

    states = states_for_check(model.facts, model.dtype, device)
    has_indexers = isinstance(model, HfModel) and bool(model.tree.indexers)
    error = check(expected, paged_results(watched, model, device, states), has_indexers, ranks)
    logger.info("chunks of %s are %.1e from the whole", model.facts.architecture, error)
    return waits.seen
