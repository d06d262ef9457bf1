"""Checkpoint -> a model that pools, compared with transformers before it serves."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from tokenmesh.engine.api.media import IMAGE, VIDEO
from tokenmesh.engine.media_facts import TEXT_ONLY, MediaFacts
from tokenmesh.engine.models.api import Progress
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.pooling.api import PoolModel
from tokenmesh.engine.models.pooling.facts import EMBEDDINGS, PoolingFacts
from tokenmesh.engine.models.pooling.heads import head_sites
from tokenmesh.engine.models.pooling.instruction import is_gritlm
from tokenmesh.engine.models.pooling.kind import (
    COLBERT,
    COLQWEN2,
    ENCODERS,
    PROJECTION,
    modules_of,
)
from tokenmesh.engine.models.quantization import read_quantization
from tokenmesh.engine.models.raw_config import RawConfig, architecture_of
from tokenmesh.engine.models.tree.adapter_sites import (
    add_sites,
    prefixes_of,
    site_problems,
)
from tokenmesh.engine.models.tree.facts import (
    HfFacts,
    build_empty,
    empty_tree,
    forget_quantization,
    hf_facts_of,
)
from tokenmesh.engine.models.tree.media.language import has_towers, media_facts
from tokenmesh.engine.models.tree.part import TreePart
from tokenmesh.engine.models.tree.part_sums import join
from tokenmesh.engine.models.tree.pooling.causal import causal_pooler
from tokenmesh.engine.models.tree.pooling.heads import make_head
from tokenmesh.engine.models.tree.pooling.layers import round_products, take_layers
from tokenmesh.engine.models.tree.pooling.model import Pooler
from tokenmesh.engine.models.tree.pooling.native_parts import take_over
from tokenmesh.engine.models.tree.pooling.tree import EncoderTree
from tokenmesh.engine.models.tree.recognise import record
from tokenmesh.engine.models.tree.run import UnservedModel
from tokenmesh.engine.models.tree.swap import swap
from tokenmesh.engine.models.tree.tree import adapt
from tokenmesh.engine.models.tree.weights import read_weights
from tokenmesh.engine.ranks.ranks import ALONE, Ranks
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.lean_import import without_compiler

logger = logging.getLogger(__name__)

TOLERANCE: Final = 1e-3
"""Largest relative error of states in float32."""
_HALF_TOLERANCE: Final = 0.05
_LENGTHS: Final = (5, 14, 14, 23)
"""These are the lengths of the prompts of the check."""


@without_compiler()
def read_pool_facts(raw: RawConfig, directory: Path, pooling: PoolingFacts) -> HfFacts:
    """Raises CheckpointError with the reason where the architecture cannot be served."""
    architecture, has_instructions = architecture_of(raw), is_gritlm(raw)
    if not has_instructions:
        _check_code(raw)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        forget_quantization(config)
        if has_instructions:
            architecture = "MistralForCausalLM"
            config.is_causal, config.sliding_window = False, None
    except Exception as error:  # whatever a config class raises about its own keys
        raise CheckpointError(
            f"{raw.origin}: transformers refuses it: {type(error).__name__}: {error}"
        ) from error
    try:
        scores = modules_of(directory, pooling.is_causal).score is not None
        kind = _class_of(_decoder_of(architecture) if scores else architecture, config, pooling)
        tree = build_empty(raw, config, kind)
        quantization = read_quantization(raw)
        facts = hf_facts_of(raw, directory, architecture, config, tree, quantization)
        body: Any = tree.base_model
        if pooling.is_causal:
            media = _media_of(architecture, body)
            return replace(facts, media=media, keeps=adapt(body, facts.ropes).probe())
        facts = replace(facts, media=TEXT_ONLY)
        encoder = EncoderTree.of(tree)
        return replace(facts, max_position=encoder.longest(facts.max_position))
    except UnservedModel as error:
        raise CheckpointError(
            f"{raw.origin}: {architecture} cannot be served: {error.message}", param="architectures"
        ) from error


def _media_of(architecture: str, body: Any) -> MediaFacts:
    """Return what prompts may hold besides text. Recordings are not pooled."""
    media = media_facts(body) if has_towers(body.config) else TEXT_ONLY
    kinds = {IMAGE} if architecture == COLQWEN2 else {IMAGE, VIDEO}
    return replace(media, kinds=media.kinds & kinds)


def _check_code(raw: RawConfig) -> None:
    """Raise CheckpointError for a decoder whose body is code of the checkpoint's own.

    Its weights would fit transformers' class, and its tokens may see each other.
    """
    code = raw.part("auto_map")
    if code is not None and "AutoModel" in code.values and raw.get("model_type") not in ENCODERS:
        problem = f"names {code.values['AutoModel']!r}, code that may compute something else"
        raise raw.error("auto_map", problem)


def _decoder_of(architecture: str) -> str:
    """The class with logits, of one that is converted to a classifier by them."""
    kind = "ForSequenceClassification"
    is_converted = architecture.endswith(kind)
    return f"{architecture.removesuffix(kind)}ForCausalLM" if is_converted else architecture


def _class_of(
    architecture: str, config: PreTrainedConfig, pooling: PoolingFacts
) -> type[PreTrainedModel]:
    """The class with its classifier, or the body alone where states are all that is wanted."""
    kind: Any = getattr(transformers, architecture, None)
    if set(pooling.tasks) & EMBEDDINGS and architecture != COLQWEN2:
        known = kind is not None or architecture == COLBERT
        kind = AutoModel._model_mapping.get(type(config), None) if known else None
    if not isinstance(kind, type) or not issubclass(kind, PreTrainedModel):
        raise UnservedModel("transformers has no such class")
    return kind


@without_compiler()
def build_pooler(
    facts: HfFacts,
    pooling: PoolingFacts,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    progress: Progress,
    has_kernels: bool,
    is_exact: bool,
    ranks: Ranks = ALONE,
) -> PoolModel:
    """Load every tensor, or the parts of this rank, of a decoder.

    has_kernels: the C kernels have been started. is_exact: they compute products of float32 in
    float32, not by integers of 16 bits, which they do unless the states show it.
    Raises CheckpointError for a tensor that is missing, misshapen or unknown, and for a tree that
    computes something else over many prompts, or in chunks, than over each prompt alone.
    """
    if facts.quantization is not None:
        checkpoint.decode(facts.quantization)
    part = None if ranks.world == 1 else TreePart(facts, ranks)
    try:
        model, unused = _read(facts, pooling, checkpoint, dtype, progress, part)
        if pooling.is_causal:
            with torch.inference_mode():
                body: Any = model.base_model  # make_head may put another in its place
                head = make_head(facts, pooling, model, checkpoint, part)
                return causal_pooler(facts, pooling, head, body, has_kernels, ranks)
        try:
            encoder = _encoder(facts, pooling, model, checkpoint, has_kernels, is_exact)
        except _RoundingShows:
            logger.info("%s is loaded again, to be computed in float32", facts.architecture)
            model, unused = _read(facts, pooling, checkpoint, dtype, progress)
            encoder = _encoder(facts, pooling, model, checkpoint, has_kernels, is_exact=True)
        encoder.sites.unused = unused
        return encoder
    except UnservedModel as error:
        raise CheckpointError(f"{facts.architecture} cannot be served: {error.message}") from error


class _RoundingShows(Exception):
    """Products of integers move the states of a model too far."""


def _read(
    facts: HfFacts,
    pooling: PoolingFacts,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    progress: Progress,
    part: TreePart | None = None,
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """The tree with its weights, and the parts that no task here reads, which it is without."""
    embeds = bool(set(pooling.tasks) & EMBEDDINGS)
    ignored = _heads_of(facts) if embeds else _Ignored()
    own = facts if part is None else part.facts
    model = read_weights(own, checkpoint, dtype, progress, ignored, part=part)
    if part is not None:
        join(model, part)
    body: Any = model.base_model
    if not embeds or getattr(body, "pooler", None) is None:
        return model, ()
    body.pooler = None
    return model, ("pooler",)


@torch.inference_mode()
def _encoder(
    facts: HfFacts,
    pooling: PoolingFacts,
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    has_kernels: bool,
    is_exact: bool,
) -> Pooler:
    body: Any = model.base_model
    prompts = [each.to(model.device) for each in _prompts(facts.vocab_size)]
    expected = torch.cat([_states_of(body, each) for each in prompts])
    tree = EncoderTree.of(model)
    head = make_head(facts, pooling, model, checkpoint)
    counts = [len(each) for each in prompts]
    ids = torch.cat(prompts)
    # what belongs to the head stays as it is: an adapter may have other weights for it
    apart = set() if tree.pooler is None else set(tree.pooler.modules())
    modules = [each for each in body.modules() if each not in apart]
    calls = record(modules, lambda: tree.states(ids, None, counts))
    problems = site_problems(body, (), calls, tree.passes(counts), may_repeat=True)
    is_native = has_kernels and tree.is_flat and tree.run.fits
    whole: set[torch.nn.Module] = set()
    if is_native:
        with tree.rows(counts):
            whole = take_layers(modules, calls, is_exact=is_exact)
    others = [each for each in modules if each not in whole]
    swap(others, calls, is_native)
    tree.sites.prefixes = prefixes_of(body, body, body.base_model_prefix)
    tree.sites.head = head_sites(head)
    add_sites(tree.sites, body, "", problems)
    if is_native:
        tree.is_native = True
        take_over(others)
        if not is_exact:
            round_products(others)
        # torch's threads spin between two operations, where those of the C kernels have work
        torch.set_num_threads(1)
    error = _distance(tree.states(ids, None, counts), expected)
    limit = TOLERANCE if model.dtype == torch.float32 else _HALF_TOLERANCE
    if not error <= limit and is_native and not is_exact and model.dtype == torch.float32:
        raise _RoundingShows
    if not error <= limit:
        raise UnservedModel(
            f"over several prompts its states are {error:.2g} away from those of each alone, and "
            f"more than {limit:.2g} is not rounding"
        )
    how = "all at once" if tree.is_flat else "by length"
    logger.info("prompts of %s run %s, %.1e from each alone", facts.architecture, how, error)
    return Pooler(facts, pooling, tree, head)


def _prompts(vocab_size: int) -> list[torch.Tensor]:
    """Return prompts of random tokens, sorted by length; no special ones, which some trees number
    differently.
    """
    generator = torch.Generator().manual_seed(0)
    first = min(16, vocab_size // 2)
    return [torch.randint(first, vocab_size, (length,), generator=generator) for length in _LENGTHS]


def _states_of(body: Any, ids: torch.Tensor) -> torch.Tensor:
    """By transformers' own code, of one prompt."""
    found = body(input_ids=ids[None])
    states: torch.Tensor = found[0] if isinstance(found, tuple) else found.last_hidden_state
    return states[0]


def _distance(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours - expected).float().norm() / expected.float().norm())


@dataclass(frozen=True, slots=True)
class _Ignored:
    """Tensors of a checkpoint that the body of a model does without."""

    unexpected: frozenset[str] = frozenset()
    missing: tuple[str, ...] = ()
    """Prefixes of the body's own that no task here reads."""

    def __call__(self, name: str, problem: str) -> bool:
        """Return whether a tensor may be missing or unexpected."""
        if problem == "missing":
            return name.startswith(self.missing)
        return name in self.unexpected or name.startswith(self.missing)


def _heads_of(facts: HfFacts) -> _Ignored:
    """Return what the checkpoint's own architecture has besides the body."""
    if facts.architecture == COLBERT:
        return _Ignored(frozenset({PROJECTION}), ("pooler.", "bert.pooler."))
    kind: Any = getattr(transformers, facts.architecture)
    if kind is facts.kind:
        return _Ignored(missing=("pooler.",))
    own = empty_tree(facts.config, kind)
    prefix = f"{own.base_model_prefix}."
    names = {name for name in own.state_dict() if not name.startswith(prefix)}
    return _Ignored(frozenset(names), ("pooler.", f"{prefix}pooler."))
