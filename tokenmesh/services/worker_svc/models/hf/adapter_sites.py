"""The linear layers of a module tree that adapters may change: those that see each token once."""

from collections.abc import Mapping
from typing import Any

import torch

from tokenmesh.kernels.linear import Linear
from tokenmesh.kernels.lora import LoraBank, add_lora
from tokenmesh.services.worker_svc.adapters.sites import Site
from tokenmesh.services.worker_svc.models.hf.model import HfModel
from tokenmesh.services.worker_svc.models.hf.recognise import FIRST_TOKENS, Calls
from tokenmesh.services.worker_svc.models.hf.swap import part_of


def site_problems(model: HfModel, calls: Calls) -> dict[str, str | None]:
    """Every linear layer by its path in the body, with the reason why it cannot have an adapter.

    Before parts of the tree are replaced; calls: of one pass. A layer that sees other rows than the
    tokens of a step in their order is refused: a mixer's, which goes from row to row, or one whose
    weight is used without it.
    """
    apart: dict[torch.nn.Module, str] = {}
    ports: list[Any] = [*model.tree.mixers, *model.tree.indexers]
    for port in ports:
        for each in port.module.modules():
            apart[each] = f"it is in a {type(port.module).__name__}, which does not run by token"
    return {
        name: apart.get(module) or _problem(module, calls)
        for name, module in model.tree.body.named_modules()
        if isinstance(module, torch.nn.Linear)
    }


def add_sites(model: HfModel, problems: Mapping[str, str | None]) -> None:
    """Give them banks, and experts that our op runs, after parts of the tree were replaced."""
    for name, why in problems.items():
        path = f"{model.sites_prefix}{name}"
        if why is None:
            _add(model, path, model.tree.body.get_submodule(name))
        else:
            model.sites.refused[path] = why
    for name, module in model.tree.body.named_modules():
        if "tokenmesh_interleaved" in vars(module):
            own: Any = module
            own.tokenmesh_bank = model.sites.add_experts(
                f"{model.sites_prefix}{name}", *own.port, is_interleaved=own.tokenmesh_interleaved
            )


def _problem(module: torch.nn.Linear, calls: Calls) -> str | None:
    call = calls.only(module)
    if call is None or call.x is None or call.out is None:
        return "it is not computed once for each token"
    if call.x.numel() != FIRST_TOKENS * module.in_features or calls.uses[id(module.weight)] != 1:
        return "it is not computed once for each token"
    return None


def _add(model: HfModel, path: str, module: Any) -> None:
    part, sites = part_of(module), model.sites
    if part is None:
        bank = sites.new_bank()
        _wrap(module, bank)
        first = 0
    else:
        layer, first = part
        bank = _bank_of(model, layer)
    sites.by_name[path] = Site(bank.number, first, module.out_features, module.in_features)


def _bank_of(model: HfModel, layer: Linear) -> LoraBank:
    if layer.adapters is None:
        layer.adapters = model.sites.new_bank()
    return layer.adapters


def _wrap(module: Any, bank: LoraBank) -> None:
    """Let a module that runs as transformers has it add what adapters do."""
    inner = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = inner(x)
        if bank.step.rows is not None:
            add_lora(x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1]), bank)
        return out

    module.forward = forward
