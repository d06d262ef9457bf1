"""Define what the modules of a tree compute, found by recording a pass and by trying them on
numbers.

Names of modules and families do not count.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from tokenmesh.engine.layers.device_step import on_device
from tokenmesh.engine.layers.step import HostStep, Step
from tokenmesh.kernels.alignment import MULTIPLE
from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.moe import ACTIVATIONS, ExpertsSpec
from tokenmesh.kernels.moe.cpu import activated
from tokenmesh.kernels.rms_norm import rms_norm

MEETS: Final = "tokenmesh_meets"
"""The attribute of a module that computes with numbers of other ranks, and stays as it is."""
FIRST_TOKENS: Final = 6
FIRST_PAGE: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a module. Tensors are kept, so that two that are not one have two identities."""

    x: torch.Tensor | None
    """The first tensor it was given."""
    out: torch.Tensor | None
    """Its result, or the first part of that."""
    is_tensor: bool = True
    """It tells whether `out` is the whole result."""


@dataclass(slots=True)
class Calls:
    """All calls of one pass."""

    by_module: dict[torch.nn.Module, list[Call]] = field(default_factory=dict)
    uses: Counter[int] = field(default_factory=Counter)
    """It says how many functions of torch took each parameter, by its id."""
    products: Counter[int] = field(default_factory=Counter)
    """It says how many of them were `linear` with the parameter as its weight and no bias."""

    def only(self, module: torch.nn.Module) -> Call | None:
        """Return the call of a module that was called once."""
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
    """Return whether a call of `linear` has an input and a weight, by position, and no bias."""
    return not kwargs and len(args) in (2, 3) and all(each is None for each in args[2:])


def record(modules: Iterable[torch.nn.Module], forward: Callable[[], object]) -> Calls:
    """Run `forward` and note the calls of `modules`."""
    calls = Calls()

    def note(module: torch.nn.Module, args: Any, named: Any, out: Any) -> None:
        given = (each for each in (*args, *named.values()) if isinstance(each, torch.Tensor))
        first = out[0] if isinstance(out, tuple) else out
        made = first if isinstance(first, torch.Tensor) else None
        calls.by_module.setdefault(module, []).append(Call(next(given, None), made, made is out))

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


_ROWS: Final = 4
_EXACT: Final = 1e-5
"""Largest difference, absolute and relative, of two float32 forms of one formula."""


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A module that is x / sqrt(mean(x * x) + eps) * weight."""

    weight: torch.Tensor
    """float32 [F]; the module's own, or 1 more."""
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Gated:
    """A module that is down(activation(gate(x)) * up(x))."""

    gate_up: list[torch.nn.Linear]
    """gate and up, or one with the outputs of both."""
    down: torch.nn.Linear
    spec: ExpertsSpec


def random_rows(*shape: int, seed: int = 0, device: torch.device | None = None) -> torch.Tensor:
    """Normal numbers in float32, the same on every call and every device; None: on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device or "cpu")


_SIZES: Final = (2.0, 30.0, 1e3)
"""Standard deviations of `gates`: limits that no small number reaches show among the large ones."""


def gates(width: int, *, device: torch.device | None = None) -> torch.Tensor:
    """Inputs [3 * 16, width] of an activation, with its gate where there is one."""
    rows = random_rows(len(_SIZES), 16, width, device=device)
    return (rows * rows.new_tensor(_SIZES)[:, None, None]).flatten(0, 1)


def is_same_gate(expected: Any, ours: torch.Tensor) -> bool:
    """`is_same` for results from `gates`: products of two numbers, each row by its own size."""
    if not isinstance(expected, torch.Tensor) or expected.shape != ours.shape:
        return False
    sizes = (ours.new_tensor(_SIZES) / _SIZES[0]).square()
    unit = sizes.repeat_interleave(len(ours) // len(sizes))[:, None]
    return is_same(expected / unit, ours / unit)


def norm_of(module: torch.nn.Module) -> Norm | None:
    """None: it is not an RMS norm."""
    own = list(module.parameters())
    if len(own) != 1 or own[0].dim() != 1 or list(module.children()) or MEETS in vars(module):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    x = random_rows(_ROWS, len(own[0]), device=own[0].device)
    if uses_triton(x) and x.shape[1] % MULTIPLE:
        return None
    x[::2] *= 1e-3  # so that eps counts
    try:
        expected = module.forward(x)
    except Exception:  # whatever a module raises that is something else
        return None
    wide = own[0].detach().float()
    for weight in (wide, wide + 1):
        for eps in _epsilons(module):
            if is_same(expected, rms_norm(x, weight, eps)):
                return Norm(weight, eps)
    return None


def _epsilons(module: torch.nn.Module) -> Iterator[float]:
    for value in vars(module).values():
        if isinstance(value, float) and 0 < value < 1e-2:
            yield value


def is_same(expected: Any, ours: torch.Tensor) -> bool:
    """Return whether both are one formula's results in float32."""
    return (
        isinstance(expected, torch.Tensor)
        and expected.shape == ours.shape
        and torch.allclose(expected.float(), ours, rtol=_EXACT, atol=_EXACT)
    )


def gated_of(
    module: torch.nn.Module, linears: dict[torch.nn.Linear, torch.Tensor], calls: Calls
) -> Gated | None:
    """None: it is not a gated MLP. linears: those that may be replaced, and what each was given."""
    call = calls.only(module)
    own = [each for each in module.children() if isinstance(each, torch.nn.Linear)]
    parameters = sum(len(list(linear.parameters())) for linear in own)
    if call is None or call.x is None or not all(linear in linears for linear in own):
        return None
    if len(list(module.parameters())) != parameters:
        return None
    firsts = [linear for linear in own if linears[linear] is call.x]
    downs = [linear for linear in own if linear not in firsts]
    if len(firsts) not in (1, 2) or len(downs) != 1:
        return None
    inner = downs[0].in_features
    sizes = [linear.out_features for linear in firsts]
    if sizes != ([2 * inner] if len(firsts) == 1 else [inner, inner]):
        return None
    for gate_up in [firsts, firsts[::-1]][: len(firsts)]:
        spec = _activation_of(module, gate_up, downs[0])
        if spec is not None:
            return Gated(gate_up, downs[0], spec)
    return None


class Given(torch.nn.Module):
    """Stands where a projection was: returns what it was made with, or what it is given."""

    def __init__(self, out: torch.Tensor | None) -> None:
        super().__init__()
        self._out = out
        self.x: torch.Tensor | None = None
        """It holds what it was given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.x = x
        return x if self._out is None else self._out


def _activation_of(
    module: torch.nn.Module, gate_up: list[torch.nn.Linear], down: torch.nn.Linear
) -> ExpertsSpec | None:
    """Return what happens between the projections, which are left out while the module is tried."""
    device = down.weight.device
    probe = gates(2 * down.in_features, device=device)
    given = [each.contiguous()[None] for each in probe.chunk(len(gate_up), dim=-1)]
    names = {child: name for name, child in module.named_children()}
    stand_ins: dict[torch.nn.Module, torch.Tensor | None] = dict(
        zip(gate_up, given, strict=True)
    ) | {down: None}
    try:
        for linear, out in stand_ins.items():
            module._modules[names[linear]] = Given(out)
        x = random_rows(1, len(probe), gate_up[0].in_features, device=device)
        (expected,) = module.forward(x)
    except Exception:  # whatever a module raises that is something else
        return None
    finally:
        for linear in stand_ins:
            module._modules[names[linear]] = linear
    specs = (ExpertsSpec(activation=each) for each in ACTIVATIONS)
    return next((each for each in specs if is_same_gate(expected, activated(probe, each))), None)
