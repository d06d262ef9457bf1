"""The linear layers of a module tree that adapters may change: those that see each token once."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from tokenmesh.engine.adapters.sites import AdapterSites, Site
from tokenmesh.engine.models.tree.expert_slots import SLOTS
from tokenmesh.engine.models.tree.part_sums import TAKEN
from tokenmesh.engine.models.tree.recognise import FIRST_TOKENS, Calls
from tokenmesh.engine.models.tree.swap import part_of
from tokenmesh.kernels.linear import Linear
from tokenmesh.kernels.lora import LoraBank, add_lora

Shape = tuple[int, int]
"""Rows and tokens of each: what one pass of a tree computes."""
_ONE_PASS: Final = ((1, FIRST_TOKENS),)


def site_problems(
    body: torch.nn.Module,
    ports: Iterable[Any],
    calls: Calls,
    passes: Sequence[Shape] = _ONE_PASS,
    *,
    may_repeat: bool = False,
) -> dict[str, str | None]:
    """Every linear layer by its path in the body, with the reason why it cannot have an adapter.

    Before parts of the tree are replaced. ports: of mixers and indexers; calls: of one step, which
    took the passes `passes`. A layer that sees other rows than the tokens of a pass in their order
    is refused: a mixer's, which goes from row to row, or one whose weight is used without it.
    may_repeat: layers may share a module, which then runs several times in each pass.
    """
    apart: dict[torch.nn.Module, str] = {}
    for port in ports:
        for each in port.module.modules():
            apart[each] = f"it is in a {type(port.module).__name__}, which does not run by token"
    return {
        name: apart.get(module) or _problem(module, calls, passes, may_repeat=may_repeat)
        for name, module in body.named_modules()
        if isinstance(module, torch.nn.Linear)
    }


def add_sites(
    sites: AdapterSites, body: torch.nn.Module, prefix: str, problems: Mapping[str, str | None]
) -> None:
    """Give them banks, and experts that our op runs, after parts of the tree were replaced.

    prefix: before the names of the body's modules, in addition to `sites.prefixes`.
    """
    for name, why in problems.items():
        path = f"{prefix}{name}"
        if why is None:
            _add(sites, path, body.get_submodule(name))
        else:
            sites.refused[path] = why
    for name, module in body.named_modules():
        if "tokenmesh_interleaved" in vars(module):
            own: Any = module
            if SLOTS in vars(own):
                sites.refused[f"{prefix}{name}"] = "its experts move between ranks (enable_eplb)"
                continue
            own.tokenmesh_bank = sites.add_experts(
                f"{prefix}{name}",
                *own.port,
                is_interleaved=own.tokenmesh_interleaved,
                taken=vars(own).get(TAKEN),
            )


def former_names(start: str) -> dict[str, str]:
    """Return how the names of a language model began before it was part of a shell: those of an
    adapter.

    start: how they begin now, such as `model.language_model.`.
    """
    if start.count(".") < 2:
        return {}
    return {"language_model.model.": start, "model.layers.": f"{start}layers."}


def prefixes_of(shell: torch.nn.Module, body: torch.nn.Module, name: str) -> tuple[str, ...]:
    """Return what may stand before the names of the body's modules in those of an adapter.

    Adapters of a model with a head have the name that the shell has in it, those of the shell alone
    do not.
    """
    within = next(each for each, module in shell.named_modules() if module is body)
    start = f"{within}." if within else ""
    return (start, f"{name}.{start}") if name else (start,)


def _problem(
    module: torch.nn.Linear, calls: Calls, passes: Sequence[Shape], *, may_repeat: bool
) -> str | None:
    found = calls.by_module.get(module, [])
    times, rest = divmod(len(found), len(passes))
    is_alone = not rest and calls.uses[id(module.weight)] == len(found)
    shapes = [shape for shape in passes for _ in range(times)]
    if (
        (times == 1 or (may_repeat and times > 1))
        and is_alone
        and all(
            call.out is not None and _is_by_token(call.x, module.in_features, shape)
            for call, shape in zip(found, shapes, strict=True)
        )
    ):
        return None
    return "it is not computed once for each token"


def _is_by_token(x: torch.Tensor | None, width: int, shape: Shape) -> bool:
    """Return whether x holds the tokens of a pass in their order."""
    rows, length = shape
    if x is None or x.numel() != rows * length * width:
        return False
    return rows == 1 or x.shape == (rows, length, width)


def _add(sites: AdapterSites, path: str, module: Any) -> None:
    part = part_of(module)
    if part is None:
        bank = sites.new_bank()
        _wrap(module, bank)
        first = 0
    else:
        layer, first = part
        bank = _bank_of(sites, layer)
    taken, shape = vars(module).get(TAKEN), (module.out_features, module.in_features)
    sites.by_name[path] = Site(bank.number, first, *shape, taken=taken)


def _bank_of(sites: AdapterSites, layer: Linear) -> LoraBank:
    if layer.adapters is None:
        layer.adapters = sites.new_bank()
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
