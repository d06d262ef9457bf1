"""Where the parts of a module tree meet: sums behind what reads a part of its inputs.

On one rank that is alone (`Ranks.alone`) there are none, and its part is a complete smaller tree.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from tokenmesh.engine.adapters.sites import TakenExperts, TakenWeight
from tokenmesh.engine.models.tree.part import TreePart
from tokenmesh.engine.models.tree.part_experts import choose_own
from tokenmesh.engine.models.tree.quantized.expert_codes import is_experts
from tokenmesh.engine.models.tree.recognise import MEETS
from tokenmesh.engine.ranks.ranks import Ranks
from tokenmesh.shared.errors import ConfigError

TAKEN: Final = "tokenmesh_taken"
"""The attribute of a module that is divided: what this rank has of it, for adapters."""
SUM: Final = "tokenmesh_sum"
"""The attribute of a module whose results are summed: what sums them."""

Total = Callable[[torch.Tensor], torch.Tensor]


def join(model: PreTrainedModel, part: TreePart) -> None:
    """Let the modules of a loaded part sum. Raises ConfigError for one that is not understood."""
    table = model.get_input_embeddings()
    for name, whole, own in part.modules():
        module: Any = model.get_submodule(name)
        if module is table:
            _take_part_of_ids(module, part)
        elif isinstance(module, torch.nn.Linear):
            setattr(module, TAKEN, _taken(part, name, whole, own))
            if whole.in_features != own.in_features:
                _sum_after(module, module.bias, part.ranks)
        elif is_experts(module):
            bias = getattr(module, "down_proj_bias", None)
            setattr(module, TAKEN, _taken_experts(part, name, whole, own))
            if part.ranks.by_expert:
                choose_own(module, part.ranks)
                bias = None  # each expert has its own, on one rank
            _sum_after(module, bias, part.ranks)
        elif "Norm" in type(module).__name__ and _extent(whole) != _extent(own):
            _mean_of_all(module, part.ranks)


def _taken(part: TreePart, name: str, whole: Any, own: Any) -> TakenWeight:
    rows, columns = part.cut_of(f"{name}.weight", whole.weight, own.weight)
    return TakenWeight(whole.out_features, whole.in_features, tuple(rows), tuple(columns))


def _taken_experts(part: TreePart, name: str, whole: Any, own: Any) -> TakenExperts:
    """The dimension of stacked weights [E, ...] that is divided is the inner one."""
    first = "gate_up_proj" if hasattr(whole, "gate_up_proj") else "up_proj"
    inner, cuts = 0, []
    for parameter in (first, "down_proj"):
        weight, smaller = getattr(whole, parameter), getattr(own, parameter)
        cut, found = part.cut_of(f"{name}.{parameter}", weight, smaller), None
        for dim in (1, 2):
            if weight.shape[dim] != smaller.shape[dim]:
                found, inner = tuple(cut[dim]), weight.shape[dim]
        cuts.append(found)
        (experts,) = cut[0]
    count = len(whole.down_proj)
    return TakenExperts(count, inner, experts, *cuts)


def _sum_after(module: torch.nn.Module, bias: torch.Tensor | None, ranks: Ranks) -> None:
    """Sum what a module returns; its bias counts once."""

    def total(x: torch.Tensor) -> torch.Tensor:
        return x if x.is_meta else ranks.sum_(x.contiguous())

    if bias is not None and not ranks.leads:
        bias.detach().zero_()
    setattr(module, SUM, total)
    module.register_forward_hook(lambda _module, _given, out: total(out))


def sum_of(module: torch.nn.Module) -> Total:
    """The function that a module's results go through where another computes them."""
    found: Total | None = vars(module).get(SUM)
    return found if found is not None else lambda x: x


def _take_part_of_ids(table: Any, part: TreePart) -> None:
    """Each row is on one rank, and the others add zeros."""
    ranks, own = part.ranks, table.forward
    rows = ranks.padded_part(part.whole.vocab_size)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        if ranks.is_alone or ids.is_meta:
            return own(ids.clamp(max=rows.stop - rows.start - 1))  # type: ignore[no-any-return]
        is_here = (ids >= rows.start) & (ids < rows.stop)
        found = own((ids - rows.start).masked_fill_(~is_here, 0))
        return ranks.sum_(found.masked_fill_(~is_here[..., None], 0))

    table.forward = forward


def _extent(norm: Any) -> int:
    """Over how many numbers a norm takes the mean."""
    size = len(next(norm.parameters(recurse=False)))
    return int(getattr(norm, "group_size", size // getattr(norm, "n_groups", 1)))


class _Means(TorchFunctionMode):
    """Means over parts of equal size -> the mean over all of them."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks
        self.count = 0

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.Tensor.mean and not found.is_meta:
            self.count += 1
            found = self._ranks.sum_(found.contiguous()).div_(self._ranks.world)
        return found


def _mean_of_all(norm: Any, ranks: Ranks) -> None:
    """Let a norm over all heads, of which each rank has some, see those of all ranks."""
    own = norm.forward

    def forward(*given: torch.Tensor) -> torch.Tensor:
        if ranks.is_alone:
            return own(*given)  # type: ignore[no-any-return]
        with _Means(ranks) as means:
            out: torch.Tensor = own(*given)
        if means.count != 1 and not out.is_meta:
            raise ConfigError(f"{type(norm).__name__} is not a norm that can be divided")
        return out

    norm.forward = forward
    setattr(norm, MEETS, True)
