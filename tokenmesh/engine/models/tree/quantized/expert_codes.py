"""Codes of a tree's experts: those of its checkpoint, or those that plain weights are rounded to.

A tree stacks the weights of all experts, which a checkpoint may store one by one. Transformers' own
conversion, run backwards on numbers that all differ, shows which part of a stack each of them is.
"""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.tree.cuts import Cut
from tokenmesh.engine.models.tree.quantized.codes import has_numbers_of, stored_codes
from tokenmesh.kernels.codes import Codes
from tokenmesh.kernels.linear.formats.round import Rounding, rounded
from tokenmesh.kernels.moe import ExpertCodes, ExpertsSpec, slices_of, weight_of

_CODES: Final = "tokenmesh_codes"
"""Attribute of an experts module: a `StoredExperts`, or a `Rounding`."""
_TAGS: Final = (4, 3)
"""Outputs and inputs of the stand-ins that show where a stored weight goes."""

View = Callable[[torch.Tensor], torch.Tensor]
_VIEWS: Final[tuple[View, ...]] = (
    lambda own: own,
    lambda own: own[: len(own) // 2],
    lambda own: own[len(own) // 2 :],
    lambda own: own[0::2],
    lambda own: own[1::2],
    lambda own: own.t(),
)
"""Parts of an expert's matrix that a checkpoint may store as one weight."""

logger = logging.getLogger(__name__)


def is_experts(module: torch.nn.Module) -> bool:
    """Return whether transformers' experts interface runs a module."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def first_name(module: Any) -> str:
    """The name of the weights of the first product."""
    return "gate_up_proj" if module.has_gate else "up_proj"


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """Where a stored weight goes in a parameter [E, ...]."""

    name: str
    expert: int | None
    """None: it is the whole parameter."""
    view: View

    def of(self, stack: torch.Tensor) -> torch.Tensor:
        return stack if self.expert is None else self.view(stack[self.expert])


def places_of(tree: PreTrainedModel, path: str) -> dict[str, list[StoredPlace]] | None:
    """The places in both parameters of the experts at `path`, by the parameter's name.

    None where a stored weight goes to none of the known places.
    """
    module, places = tree.get_submodule(path), {}
    for name in (first_name(module), "down_proj"):
        count = len(module.get_parameter(name))
        tags = torch.arange(float(count * _TAGS[0] * _TAGS[1])).view(count, *_TAGS)
        pieces = revert_weight_conversion(tree, {f"{path}.{name}": tags})
        found = [_place(each, piece, tags) for each, piece in pieces.items()]
        places[name] = [each for each in found if each is not None]
        if len(places[name]) != len(found):
            return None
    return places


def _place(name: str, piece: torch.Tensor, tags: torch.Tensor) -> StoredPlace | None:
    """Where `piece` is in `tags` [E, 4, 3]; None where it is at none of the known places."""
    if piece.shape == tags.shape and torch.equal(piece, tags):
        return StoredPlace(name, None, _VIEWS[0])
    expert = int(piece.flatten()[0]) // (_TAGS[0] * _TAGS[1])
    for view in _VIEWS:
        if torch.equal(view(tags[expert]), piece):
            return StoredPlace(name, expert, view)
    return None


Parts = Callable[[int], Sequence[torch.Tensor]]
"""An expert's number -> views of its plain weights, in the order of its codes."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredExperts:
    """A layer's experts in a checkpoint."""

    checkpoint: Checkpoint
    places: Mapping[str, list[StoredPlace]]
    """By the parameter's name."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """The cuts of stored weights of which a rank has a part."""

    def __deepcopy__(self, _memo: object) -> "StoredExperts":
        return self

    def reader(
        self, name: str, stack: torch.Tensor, parts: Parts, spec: ExpertsSpec
    ) -> ExpertCodes | None:
        """Reads the codes of experts whose numbers are those of `stack`, the parameter `name`.

        None where it is not encoded.
        """
        places = self.places[name]
        if not all(self.checkpoint.is_encoded(place.name) for place in places):
            return None
        if places[0].expert is None:
            read = self._of_stack(places[0].name, spec)
        else:
            names = {_memory_of(place.of(stack)): place.name for place in places}
            read = self._one_by_one(names)

        def found(expert: int) -> Sequence[Codes] | None:
            weights = parts(expert)
            codes = read(expert, weights)
            codes = None if codes is None else [each.to(stack.device) for each in codes]
            if codes is None or not all(map(has_numbers_of, codes, weights)):
                what = "expert %d of %s is not kept as it is stored"
                logger.info(what, expert, places[0].name)
                return None
            return codes

        return found

    def _codes(self, name: str, shape: Sequence[int]) -> Codes | None:
        return stored_codes(self.checkpoint, name, shape, self.cuts.get(name))

    def _one_by_one(self, names: Mapping[Hashable, str]) -> "Reader":
        """names: by the memory of the plain weights."""

        def read(_expert: int, weights: Sequence[torch.Tensor]) -> Sequence[Codes] | None:
            found = []
            for weight in weights:
                name = names.get(_memory_of(weight))
                codes = None if name is None else self._codes(name, weight.shape)
                if codes is None:
                    return None
                found.append(codes)
            return found

        return read

    def _of_stack(self, name: str, spec: ExpertsSpec) -> "Reader":
        """Return the reader of a weight that is the whole parameter."""
        codes_of = self.checkpoint.take_stack(name)

        def read(expert: int, weights: Sequence[torch.Tensor]) -> Sequence[Codes] | None:
            codes = codes_of(expert)
            if codes is None or len(weights) == 1:
                return None if codes is None else [codes]
            rows = torch.arange(codes.shape[0])
            halves = (rows[0::2], rows[1::2]) if spec.is_interleaved else rows.chunk(2)
            return [codes.rows(half) for half in halves]

        return read


Reader = Callable[[int, Sequence[torch.Tensor]], Sequence[Codes] | None]
"""An expert's number and its plain weights -> their codes, which may have other numbers."""


def _memory_of(view: torch.Tensor) -> Hashable:
    return view.data_ptr(), view.shape, view.stride()


def offer_stored_experts(
    tree: PreTrainedModel, checkpoint: Checkpoint, cuts: Mapping[str, Cut]
) -> None:
    """Let experts have the codes that the checkpoint stores for each; see `offer_stored`."""
    for path, module in tree.named_modules():
        if is_experts(module) and _CODES not in vars(module):
            places = places_of(tree, path)
            if places is not None:
                offer(module, StoredExperts(checkpoint, places, cuts))


def offer(module: torch.nn.Module, codes: StoredExperts | Rounding) -> None:
    """Let experts have stored codes, or those of what their weights are rounded to."""
    setattr(module, _CODES, codes)


def round_numbers(module: Any, spec: ExpertsSpec, rounding: Rounding) -> None:
    """Give experts the numbers that their weights are rounded to."""
    w13, w2 = getattr(module, first_name(module)).data, module.down_proj.data
    for expert in range(len(w2)):
        for weight in (*slices_of(w13, expert, spec), weight_of(w2, expert, spec)):
            weight.copy_(rounded(weight.contiguous(), rounding).decoded())


def expert_codes(
    module: Any, w13: torch.Tensor, w2: torch.Tensor, spec: ExpertsSpec
) -> tuple[ExpertCodes | None, ExpertCodes | None]:
    """Return what was offered to a module with these weights; it is offered once."""
    offered: StoredExperts | Rounding | None = vars(module).pop(_CODES, None)
    if offered is None:
        return None, None

    def firsts(expert: int) -> Sequence[torch.Tensor]:
        return slices_of(w13, expert, spec)

    def seconds(expert: int) -> Sequence[torch.Tensor]:
        return (weight_of(w2, expert, spec),)

    if isinstance(offered, StoredExperts):
        return (
            offered.reader(first_name(module), w13, firsts, spec),
            offered.reader("down_proj", w2, seconds, spec),
        )

    def rounds(parts: Parts) -> ExpertCodes:
        return lambda expert: [rounded(each.contiguous(), offered) for each in parts(expert)]

    return rounds(firsts), rounds(seconds)
