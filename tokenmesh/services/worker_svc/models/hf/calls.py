"""What the modules of a tree are called with in one pass, and what else uses their weights."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from tokenmesh.services.worker_svc.layers.device_step import on_device
from tokenmesh.services.worker_svc.layers.step import HostStep, Step

FIRST_TOKENS: Final = 6
FIRST_PAGE: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a module. Tensors are kept, so that two that are not one have two identities."""

    x: torch.Tensor | None
    """The first tensor it was given."""
    out: torch.Tensor | None
    """Its result, or the first part of that."""


@dataclass(slots=True)
class Calls:
    """All calls of one pass."""

    by_module: dict[torch.nn.Module, list[Call]] = field(default_factory=dict)
    uses: Counter[int] = field(default_factory=Counter)
    """How many functions of torch took each parameter, by its id."""
    products: Counter[int] = field(default_factory=Counter)
    """How many of them were `linear` with the parameter as its weight and no bias."""

    def only(self, module: torch.nn.Module) -> Call | None:
        """Of a module that was called once."""
        calls = self.by_module.get(module, [])
        return calls[0] if len(calls) == 1 else None


class _Uses(TorchFunctionMode):
    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        for each in [
            *given,
            *(e for part in given if isinstance(part, list | tuple) for e in part),
        ]:
            if isinstance(each, torch.nn.Parameter):
                self._calls.uses[id(each)] += 1
        if func is torch.nn.functional.linear and is_plain_product(args, kwargs):
            self._calls.products[id(args[1])] += 1
        return func(*args, **(kwargs or {}))


def is_plain_product(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    """Whether a call of `linear` has an input and a weight, by position, and no bias."""
    return not kwargs and len(args) in (2, 3) and all(each is None for each in args[2:])


def record(modules: Iterable[torch.nn.Module], forward: Callable[[], object]) -> Calls:
    """Run `forward` and note the calls of `modules`."""
    calls = Calls()

    def note(module: torch.nn.Module, args: Any, named: Any, out: Any) -> None:
        given = (each for each in (*args, *named.values()) if isinstance(each, torch.Tensor))
        first = out[0] if isinstance(out, tuple) else out
        made = first if isinstance(first, torch.Tensor) else None
        calls.by_module.setdefault(module, []).append(Call(next(given, None), made))

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
    try:
        with _Uses(calls):
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def first_step(device: torch.device) -> Step:
    """The first tokens of one row, number 0; its blocks are 1 and 2 of a store with pages of
    FIRST_PAGE."""
    step = HostStep(
        starts=[0],
        counts=[FIRST_TOKENS],
        numbers=[0],
        all_tables=torch.tensor([[1, 2]]),
        page_size=FIRST_PAGE,
        token_lengths=range(1, FIRST_TOKENS + 1),
    )
    return on_device(step, device)
