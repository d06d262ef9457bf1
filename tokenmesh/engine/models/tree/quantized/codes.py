"""Codes of a tree's linear layers: what `swap` multiplies with in place of plain weights.

A tree holds plain weights first, since its own code computes what ours is compared with.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from tokenmesh.engine.models.checkpoint import Checkpoint, listed
from tokenmesh.engine.models.tree.cuts import Cut
from tokenmesh.kernels.linear.formats import Codes, merged
from tokenmesh.kernels.linear.formats.round import Grid, Rounding, head_grid, rounded
from tokenmesh.kernels.quantized_linear import DeviceCodes

_CODES: Final = "tokenmesh_codes"
"""Attribute of a linear layer: its Offer."""
_COMPARED_ROWS: Final = 4096
_ROUTERS: Final = ("gate", "router", "shared_expert_gate")
"""Last names of layers that choose experts, which are never rounded."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Offer:
    """The codes that a linear layer could multiply with."""

    name: str
    make: Callable[[torch.Tensor], Codes | None]
    """Weight -> codes; None where there are none."""


def offer_stored(tree: torch.nn.Module, checkpoint: Checkpoint, cuts: Mapping[str, Cut]) -> None:
    """Let linear layers have the codes that the checkpoint stores under their own names, or under
    the name of the table whose weight is theirs too. cuts: of those that are divided."""
    tables = {
        id(module.weight): f"{name}.weight"
        for name, module in tree.named_modules()
        if isinstance(module, torch.nn.Embedding)
    }
    for name, module in tree.named_modules():
        if type(module) is not torch.nn.Linear:
            continue
        for weight in (f"{name}.weight", tables.get(id(module.weight), "")):
            if checkpoint.is_encoded(weight):
                setattr(module, _CODES, Offer(name, partial(_stored, checkpoint, weight, cuts)))
                break


def _stored(
    checkpoint: Checkpoint, name: str, cuts: Mapping[str, Cut], weight: torch.Tensor
) -> Codes | None:
    """None where loading has made something else of the stored weight."""
    codes = stored_codes(checkpoint, name, weight.shape, cuts.get(name))
    codes = None if codes is None else codes.to(weight.device)
    return codes if codes is not None and has_numbers_of(codes, weight) else None


def stored_codes(
    checkpoint: Checkpoint, name: str, shape: Sequence[int], cut: Cut | None = None
) -> Codes | None:
    """The codes of a stored weight [O, I], or of a part of it; None where it has none, or another
    shape, or where codes cannot be divided there."""
    whole = checkpoint.decoded_shape(name)
    if len(whole) != 2 or (cut is None and whole != tuple(shape)):
        return None
    named = [(name, whole[0])]
    if cut is None:
        return checkpoint.take_codes(named, whole[1])
    rows, columns = cut
    if len(columns) != 1:
        return None
    codes = checkpoint.take_codes(named, whole[1], [rows], columns[0])
    width = columns[0].stop - columns[0].start
    return codes if codes is None or codes.shape[1] == width else None


def has_numbers_of(codes: Codes, weight: torch.Tensor) -> bool:
    """Return whether codes stand for a plain weight, as it is rounded to its type."""
    if codes.shape != tuple(weight.shape):
        return False
    # row by row: a large table in float32 would take more than the model
    largest, farthest = torch.zeros(2, device=weight.device).unbind()
    rows = torch.arange(len(weight), device=weight.device)
    for first in range(0, len(weight), _COMPARED_ROWS):
        index = rows[first : first + _COMPARED_ROWS]
        decoded = codes.rows(index).decoded().to(weight.dtype)
        difference = (decoded - weight[index]).abs().max().float()
        if not bool(difference.isfinite()):
            return False
        largest = torch.maximum(largest, decoded.abs().max().float())
        farthest = torch.maximum(farthest, difference)
    return bool(farthest <= torch.finfo(weight.dtype).eps * largest)


def round_weights(tree: torch.nn.Module, head: torch.nn.Module | None, rounding: Rounding) -> None:
    """Give linear layers the numbers that their weights are rounded to, and their codes.

    head: see `head_grid`.
    """
    for name, module in tree.named_modules():
        if type(module) is not torch.nn.Linear or name.rpartition(".")[2] in _ROUTERS:
            continue
        own: Grid = head_grid(rounding, module.weight.device) if module is head else rounding
        with torch.no_grad():
            module.weight.copy_(rounded(module.weight, own).decoded())
        setattr(module, _CODES, Offer(name, partial(rounded, to=own)))


def codes_of(group: list[torch.nn.Linear]) -> Codes | None:
    """Return the codes of layers that read the same input; None where one has none, they do not go
    together, or their GPU has no kernel for them.
    """
    offers: list[Offer | None] = [vars(each).pop(_CODES, None) for each in group]
    offered = [each for each in offers if each is not None]
    if not offered:
        return None
    codes = _merged(group, offers)
    if not group[0].weight.is_cuda:
        return codes
    problem = "the format has no codes, or layers of one input have several"
    if codes is not None:
        found = DeviceCodes.problem(codes)
        if found is None:
            return codes
        problem = found
    what = "the weights of %s are decoded, which saves no memory: %s"
    logger.warning(what, listed([each.name for each in offered]), problem)
    return None


def _merged(group: list[torch.nn.Linear], offers: list[Offer | None]) -> Codes | None:
    found = []
    for each, offer in zip(group, offers, strict=True):
        codes = None if offer is None else offer.make(each.weight.detach())
        if codes is None:
            return None
        found.append(codes)
    return merged(found)
