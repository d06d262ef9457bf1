"""Define what a tree's weights are multiplied as, where that is not as plain weights."""

import logging
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.tree.cuts import Cut
from tokenmesh.engine.models.tree.experts import spec_of
from tokenmesh.engine.models.tree.facts import HfFacts, empty_tree
from tokenmesh.engine.models.tree.quantized.codes import offer_stored, round_weights
from tokenmesh.engine.models.tree.quantized.deferred_experts import (
    DeferredExperts,
    deferred_of,
    find_deferred,
)
from tokenmesh.engine.models.tree.quantized.expert_codes import (
    is_experts,
    offer,
    offer_stored_experts,
    round_numbers,
)
from tokenmesh.kernels.linear.formats.round import Rounding
from tokenmesh.kernels.moe import ExpertsSpec

logger = logging.getLogger(__name__)


def offer_codes(
    tree: PreTrainedModel, checkpoint: Checkpoint, facts: HfFacts, cuts: Mapping[str, Cut]
) -> None:
    """Let a tree have the codes that its checkpoint stores, or those of what weights are rounded
    to, whose numbers it gets. cuts: of the stored weights of which it has a part."""
    if facts.quantization is not None:
        offer_stored(tree, checkpoint, cuts)
        offer_stored_experts(tree, checkpoint, cuts)
    if facts.rounding is not None:
        round_weights(tree, tree.get_output_embeddings(), facts.rounding)
        round_experts(tree, facts.rounding)


def experts_to_defer(
    facts: HfFacts, checkpoint: Checkpoint, dtype: torch.dtype, has_kernels: bool
) -> dict[str, DeferredExperts]:
    """Experts that become codes, where all of them as plain weights would fill memory."""
    is_coded = facts.quantization is not None or facts.rounding is not None
    if not is_coded or not (has_kernels or checkpoint.device.type == "cuda"):
        return {}
    return find_deferred(empty_tree(facts.config, facts.kind), checkpoint, dtype)


def round_experts(tree: torch.nn.Module, rounding: Rounding) -> None:
    """Round the weights of all experts that our op runs; the others stay plain."""
    for module in tree.modules():
        if is_experts(module):
            try:
                _round(module, spec_of(module), rounding)
            except ValueError as error:
                logger.warning("%s; they are not rounded", error)


def _round(module: torch.nn.Module, spec: ExpertsSpec, rounding: Rounding) -> None:
    deferred = deferred_of(module)
    if deferred is None:
        round_numbers(module, spec, rounding)
    else:
        deferred.rounding = rounding, spec
    offer(module, rounding)
