"""Adapters of experts: PEFT's `target_parameters` on parameters [E, outputs, inputs].

PEFT stores the matrices of all experts of a parameter in one pair and not the parameter's name: the
shapes say which product it is for.
"""

from dataclasses import dataclass, field
from typing import Final

import torch

from tokenmesh.engine.adapters.peft_config import PeftConfig, refusal
from tokenmesh.engine.adapters.read_matrix import MatrixReader
from tokenmesh.engine.adapters.sites import ExpertsSite
from tokenmesh.kernels.lora import LoraExperts
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.tensor_file import TensorFile

_WRAPPED: Final = ".base_layer"
"""Behind the path where both parameters are adapted: PEFT wraps one wrapper in the other."""
_CLEAR_VERSION: Final = (0, 21)
"""This is the version of PEFT, from which on outputs and inputs of stacked parameters are known not
to be swapped."""


@dataclass(slots=True)
class ExpertsParts:
    """The matrices of one layer, as they are read."""

    site: ExpertsSite
    first: tuple[torch.Tensor, torch.Tensor] | None = None
    second: tuple[torch.Tensor, torch.Tensor] | None = None
    names: set[bool] = field(default_factory=set)
    """It says which products have been planned; True: the first."""

    def matrices(self) -> LoraExperts:
        a13, b13 = self.first or (None, None)
        a2, b2 = self.second or (None, None)
        return LoraExperts(self.site.num_experts, a13, b13, a2, b2)


def experts_path(module: str) -> str:
    """The path of a module of experts, from that of its wrappers."""
    while module.endswith(_WRAPPED):
        module = module.removesuffix(_WRAPPED)
    return module


def parameter_of(site: ExpertsSite, module: str, *, is_first: bool) -> str:
    """The path of the parameter of a product, which the keys of a config match."""
    if not is_first:
        return f"{module}.down_proj"
    return f"{module}.gate_up_proj" if site.is_gated else f"{module}.up_proj"


def is_first_product(
    config: PeftConfig, file: TensorFile, site: ExpertsSite, module: str, names: tuple[str, str]
) -> bool:
    """Return which product a pair of tensors changes.

    Raises InvalidInput where they do not fit one.
    """
    stored, site = (file[names[0]].shape, file[names[1]].shape), site.whole
    rows, rows_of_second = (
        config.rank_of(parameter_of(site, module, is_first=each)) * site.num_experts
        for each in (True, False)
    )
    first = ((rows, site.hidden), (site.first_outputs, rows))
    second = ((rows_of_second, site.inner), (site.hidden, rows_of_second))
    if stored not in (first, second):
        what = f"and lora_B have shapes {[list(each) for each in stored]}; the experts need "
        what += f"{[list(each) for each in first]} or {[list(each) for each in second]}"
        raise refusal(file.path, names[0], what)
    is_unclear = not site.is_gated or site.hidden in (site.first_outputs, site.inner)
    if is_unclear and config.version < _CLEAR_VERSION:
        what = "may have outputs and inputs swapped: save the adapter with PEFT "
        raise refusal(config.file, "peft_version", what + ".".join(map(str, _CLEAR_VERSION)))
    return stored == first


def add_pair(
    parts: ExpertsParts,
    reader: MatrixReader,
    names: tuple[str, str],
    scale: float,
    *,
    is_first: bool,
) -> None:
    """a [E * r, I] and b [O, r * E], expert by expert -> [E, r, I] and [E, r, O] of this rank."""
    site, taken = parts.site, parts.site.taken
    count, experts = site.whole.num_experts, slice(0, site.num_experts)
    inputs = outputs = None
    if taken is not None:
        experts = taken.experts
        inputs, outputs = (None, taken.rows) if is_first else (taken.columns, None)
    a = reader.read(names[0], inputs)
    columns = reader.read_turned(names[1], scale, outputs)
    columns = columns.view(-1, count, columns.shape[1])[:, experts]
    b = torch.empty((columns.shape[1], *columns[:, 0].shape), dtype=columns.dtype, device="cpu")
    for expert, own in enumerate(b):
        own.copy_(columns[:, expert])
        if is_first and site.is_reordered:
            own.copy_(torch.cat((own[:, 0::2], own[:, 1::2]), dim=1))
        reader.pace.rest()
    a = a.view(count, -1, a.shape[1])
    pair = (a if len(b) == count else a[experts].clone(), b)
    if is_first:
        parts.first = pair
    else:
        parts.second = pair


def check_once(parts: ExpertsParts, is_first: bool, file: TensorFile, name: str) -> None:
    """Raises InvalidInput for a second pair of one product."""
    if is_first in parts.names:
        raise InvalidInput(
            f"{file.path}: {name} is a second pair of matrices for one parameter",
            param="lora_path",
        )
    parts.names.add(is_first)
