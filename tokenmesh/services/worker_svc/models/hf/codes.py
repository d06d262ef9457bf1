"""Codes of a tree's linear layers: what `swap` multiplies with in place of plain weights.

A tree holds plain weights first, since its own code computes what ours is compared with.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from tokenmesh.kernels.linear.formats import Codes, merged
from tokenmesh.kernels.linear.formats.round import Rounding, rounded
from tokenmesh.services.worker_svc.models.checkpoint import Checkpoint

_CODES: Final = "tokenmesh_codes"
"""Attribute of a linear layer: a function that makes its codes."""
_ROUTERS: Final = ("gate", "router", "shared_expert_gate")
"""Last names of layers that choose experts, which are never rounded."""


def offer_stored(tree: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Let linear layers have the codes that the checkpoint stores under their own names."""
    for name, module in tree.named_modules():
        weight = f"{name}.weight"
        if type(module) is torch.nn.Linear and checkpoint.is_encoded(weight):
            setattr(module, _CODES, partial(_stored, checkpoint, weight))


def _stored(checkpoint: Checkpoint, name: str, weight: torch.Tensor) -> Codes | None:
    """None where loading has made something else of the stored weight."""
    if checkpoint.decoded_shape(name) != tuple(weight.shape):
        return None
    codes = checkpoint.take_codes([(name, weight.shape[0])], weight.shape[1])
    if codes is None:
        return None
    decoded = codes.decoded().to(weight.dtype)
    limit = float(torch.finfo(weight.dtype).eps) * float(decoded.abs().max())
    return codes if bool(((decoded - weight).abs() <= limit).all()) else None


def round_weights(tree: torch.nn.Module, head: torch.nn.Module | None, rounding: Rounding) -> None:
    """Give linear layers the numbers that their weights are rounded to, and their codes.

    head: is not rounded to less than 8 bits.
    """
    for name, module in tree.named_modules():
        if type(module) is not torch.nn.Linear or name.rpartition(".")[2] in _ROUTERS:
            continue
        own: Rounding = "int8" if module is head and rounding == "int4" else rounding
        with torch.no_grad():
            module.weight.copy_(rounded(module.weight, own).decoded())
        setattr(module, _CODES, partial(rounded, to=own))


def codes_of(group: list[torch.nn.Linear]) -> Codes | None:
    """Of layers that read the same input; None where one has none or they do not go together."""
    found = []
    for each in group:
        own: Any = vars(each)
        make: Callable[[torch.Tensor], Codes | None] | None = own.pop(_CODES, None)
        codes = None if make is None else make(each.weight.detach())
        if codes is None:
            return None
        found.append(codes)
    return merged(found)
