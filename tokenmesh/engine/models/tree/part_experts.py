"""Experts in parallel: a rank has some of a layer's experts, each of them whole.

All tokens are on all ranks. A rank adds the results of its own experts, and the parts are summed.
"""

import copy
from collections.abc import Mapping
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from tokenmesh.engine.models.tree.expert_slots import SLOTS, ExpertSlots
from tokenmesh.engine.models.tree.quantized.expert_codes import is_experts, places_of
from tokenmesh.engine.ranks.ranks import Ranks
from tokenmesh.shared.errors import ConfigError

_PARAM: Final = "worker.enable_expert_parallel"


def part_of_experts(tree: PreTrainedModel, ranks: Ranks) -> Mapping[str, torch.nn.Module]:
    """Modules like those of a rank, by their paths; none where ranks do not have whole experts.

    Raises ConfigError with both numbers.
    """
    found: dict[str, torch.nn.Module] = {}
    for path, module in tree.named_modules():
        if not (ranks.by_expert and is_experts(module)):
            continue
        count = len(module.down_proj)
        if count % ranks.world:
            problem = f"{count} experts are not divisible by {ranks.world} ranks"
            raise ConfigError(f"enable_expert_parallel: {problem}", param=_PARAM)
        own: Any = copy.copy(module)
        own._parameters = {
            name: torch.nn.Parameter(each.detach()[: count // ranks.world], requires_grad=False)
            for name, each in module.named_parameters(recurse=False)
        }
        own.num_experts = count // ranks.world
        found[path] = own
    return found


def take_form(module: torch.nn.Module, like: torch.nn.Module) -> None:
    """Give a module, which has no weights yet, the shapes and sizes of another of its class."""
    for name, each in like.named_parameters(recurse=False):
        own = torch.empty(each.shape, device="meta", dtype=module.get_parameter(name).dtype)
        module.register_parameter(name, torch.nn.Parameter(own, requires_grad=False))
    for key, value in vars(like).items():
        if isinstance(value, int) and not isinstance(value, bool):
            setattr(module, key, value)


def names_of_others(tree: PreTrainedModel, ranks: Ranks) -> set[str]:
    """Names of stored tensors that are one expert's of another rank."""
    others = set()
    for path, module in tree.named_modules():
        if not (ranks.by_expert and is_experts(module)):
            continue
        places = places_of(tree, path)
        if places is None:
            problem = f"where the checkpoint stores those of {path} is not known"
            raise ConfigError(f"experts are not divided: {problem}", param=_PARAM)
        own = ranks.part(len(module.down_proj))
        for place in (each for found in places.values() for each in found):
            if place.expert is not None and place.expert not in range(own.start, own.stop):
                others.add(place.name)
    return others


def choose_own(module: Any, ranks: Ranks) -> None:
    """Let experts of a rank get their own numbers; those of other ranks add nothing."""
    count = module.num_experts
    first = ranks.rank * count
    slots = None
    if ranks.redundant is not None:
        slots = ExpertSlots(module, ranks, ranks.redundant)
        setattr(module, SLOTS, slots)

    def hook(_module: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, ids, weights = given
        own, size = (ids - first, count) if slots is None else (slots.own(ids), slots.each)
        is_here = (own >= 0) & (own < size)
        if getattr(module, "port", None) is not None:
            return x, own.masked_fill(~is_here, size), weights
        # not all of transformers' experts know a number that is none of theirs
        return x, own.masked_fill(~is_here, 0), weights.masked_fill(~is_here, 0)

    module.register_forward_pre_hook(hook)
