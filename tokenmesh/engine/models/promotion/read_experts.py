"""A layer's experts, read by trying the module around them on numbers, the experts left out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any, Final

import torch
from torch.nn import functional

from tokenmesh.engine.models.promotion.read_heads import Unread
from tokenmesh.engine.models.tree.experts import spec_of
from tokenmesh.engine.models.tree.quantized.expert_codes import is_experts
from tokenmesh.engine.models.tree.recognise import is_same, random_rows
from tokenmesh.kernels.moe import SCORES, Routing, route

_ROWS: Final = 64
_SPREAD: Final = 2.0
"""Standard deviation of random logits."""
_ROUND: Final = 1e-6
_EXACT: Final = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsReading:
    """The parts of a layer's experts, by their names within the layer."""

    block: str
    """The module around all of them."""
    experts: str
    router: str
    """A parameter [E, hidden]."""
    bias: str | None
    """The router's bias, [E] or [1, E]."""
    correction: str | None
    """The correction of the choice, [E] or [1, E]; see `route`."""
    routing: Routing
    is_wide: bool
    """The router computes in float32."""
    shared_gate: str | None
    """A linear layer, see `Experts`."""

    def router_of(self, layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
        bias = None if self.bias is None else _tensor(layer, self.bias).flatten()
        return _tensor(layer, self.router), bias

    def correction_of(self, layer: torch.nn.Module) -> torch.Tensor | None:
        name = self.correction
        return None if name is None else _tensor(layer, name).flatten().float()


@dataclass(frozen=True, slots=True)
class _Seen:
    """One pass of a block without its experts. T tokens, k of them for each."""

    ids: torch.Tensor
    weights: torch.Tensor
    made: torch.Tensor
    """[T, H] by the stand-in of the experts."""
    out: torch.Tensor
    """[T, H]"""


class _StandIn(torch.nn.Module):
    """Replaces experts: records their arguments and returns random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[list[torch.Tensor], torch.Tensor]] = []

    def forward(self, *args: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        given = [*args, *named.values()]
        made = random_rows(*given[0].shape, seed=1).to(given[0])
        self.calls.append((given, made))
        return made.clone()


def find_experts(layer: torch.nn.Module) -> tuple[str, str] | None:
    """The names of the block and of the experts in it; None: the layer has none. Raises Unread."""
    names = [name for name, each in layer.named_modules() if is_experts(each)]
    if not names:
        return None
    if len(names) > 1 or "." not in names[0]:
        raise Unread("its experts are not all within one module")
    return names[0].rpartition(".")[0], names[0]


def read_experts(
    layer: torch.nn.Module, block: str, experts: str, shared: torch.nn.Module | None
) -> ExpertsReading:
    """Read those of a layer in float32; shared: the gated MLP alongside them. Raises Unread.

    The router's weights are others while this runs.
    """
    inside: Any = layer.get_submodule(experts)
    try:
        spec_of(inside)
    except ValueError as error:
        raise Unread(str(error)) from None
    known = {id(p) for each in (inside, shared) if each is not None for p in each.parameters()}
    tensors = {
        f"{block}.{name}": each
        for module in (layer.get_submodule(block),)
        for name, each in (*module.named_parameters(), *module.named_buffers())
        if id(each) not in known
    }
    count = inside.down_proj.shape[0]
    hidden = inside.down_proj.shape[-1 if inside.is_transposed else -2]
    routers = [name for name, each in tensors.items() if each.shape == (count, hidden)]
    vectors = [n for n, each in tensors.items() if each.shape in ((count,), (1, count))]
    if len(routers) != 1:
        raise Unread(f"its router has {len(routers)} matrices")
    x = random_rows(1, _ROWS, hidden, device=next(layer.parameters()).device)
    with _randomized([tensors[name] for name in (*routers, *vectors)]):
        seen = _run(layer, block, experts, x)
        bias, correction, routing = _choice_of(tensors, routers[0], vectors, x[0], seen)
        gate = _shared_gate_of(layer, block, shared, x[0], seen)
    return ExpertsReading(
        block=block,
        experts=experts,
        router=routers[0],
        bias=bias,
        correction=correction,
        routing=routing,
        is_wide=True,
        shared_gate=gate,
    )


def in_dtype(reading: ExpertsReading, layer: torch.nn.Module) -> ExpertsReading:
    """The reading of the same layer in the dtype that it runs in."""
    weight, bias = reading.router_of(layer)
    if weight.dtype == torch.float32:
        return reading
    x = random_rows(1, _ROWS, weight.shape[1]).to(weight)
    seen = _run(layer, reading.block, reading.experts, x)
    theirs = _by_expert(seen.ids, seen.weights, len(weight))
    fits = []
    for dtype in (weight.dtype, torch.float32):
        logits = functional.linear(
            x[0].to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        )
        ids, weights = route(logits, reading.correction_of(layer), reading.routing)
        ours = _by_expert(ids, weights.to(seen.weights.dtype), len(weight))
        fits.append(int(torch.isclose(ours, theirs, rtol=_EXACT, atol=0).sum()))
    return replace(reading, is_wide=fits[1] > fits[0])


@contextmanager
def _randomized(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Give tensors random values meanwhile: a checkpoint's may be zero and hide their use."""
    kept = [each.detach().clone() for each in tensors]
    try:
        for seed, each in enumerate(tensors, start=2):
            factor = _SPREAD / each.shape[1] ** 0.5 if each.squeeze().dim() == 2 else 0.5
            each.data.copy_(factor * random_rows(*each.shape, seed=seed))
        yield
    finally:
        for each, value in zip(tensors, kept, strict=True):
            each.data.copy_(value)


def _run(layer: torch.nn.Module, block: str, experts: str, x: torch.Tensor) -> _Seen:
    """The block on x [1, T, H] without its experts."""
    parent, name = layer.get_submodule(experts.rpartition(".")[0]), experts.rpartition(".")[2]
    inside, stand_in = layer.get_submodule(experts), _StandIn()
    parent._modules[name] = stand_in
    try:
        out = layer.get_submodule(block)(x)
    finally:
        parent._modules[name] = inside
    if isinstance(out, tuple):
        out = out[0]
    if len(stand_in.calls) != 1 or len(stand_in.calls[0][0]) != 3:
        raise Unread("its experts are not called once with tokens, ids and weights")
    (given, ids, weights), made = stand_in.calls[0]
    if given.shape != x[0].shape or not torch.equal(given.to(x.dtype), x[0]):
        raise Unread("its experts read something else than its router")
    if ids.dtype != torch.int64 or ids.dim() != 2 or weights.shape != ids.shape:
        raise Unread("its router is not one that chooses experts by token")
    return _Seen(ids, weights, made, out.reshape(made.shape))


def _by_expert(ids: torch.Tensor, weights: torch.Tensor, count: int) -> torch.Tensor:
    """[T, E]; zero for those that were not chosen."""
    return torch.zeros(len(ids), count, device=ids.device).scatter(1, ids, weights.float())


def _choice_of(
    tensors: dict[str, torch.Tensor],
    router: str,
    vectors: list[str],
    x: torch.Tensor,
    seen: _Seen,
) -> tuple[str | None, str | None, Routing]:
    """Names of bias and correction, and the routing."""
    top_k, count = seen.ids.shape[1], len(tensors[router])
    theirs = _by_expert(seen.ids, seen.weights, count)
    roles = [pair for pair in permutations([None, None, *vectors], 2) if set(vectors) <= set(pair)]
    for (bias, correction), scores, is_normalized in product(roles, SCORES, (False, True)):
        logits = functional.linear(
            x, tensors[router], None if bias is None else tensors[bias].flatten()
        )
        routing = Routing(top_k=top_k, scores=scores, is_normalized=is_normalized)
        added = None if correction is None else tensors[correction].flatten()
        ours = _by_expert(*route(logits, added, routing), count)
        scale = float((theirs * ours).sum() / (ours * ours).sum())
        if is_same(theirs, ours * scale):
            scale = 1.0 if abs(scale - 1) < _ROUND else scale
            return (
                bias,
                correction,
                Routing(top_k=top_k, scores=scores, is_normalized=is_normalized, scale=scale),
            )
    raise Unread("its router chooses in an unsupported way")


def _shared_gate_of(
    layer: torch.nn.Module,
    block: str,
    shared: torch.nn.Module | None,
    x: torch.Tensor,
    seen: _Seen,
) -> str | None:
    """The linear layer whose sigmoid scales the shared expert. Raises Unread for another sum."""
    if shared is None:
        if not is_same(seen.out, seen.made):
            raise Unread("its experts' result is not all that their module makes")
        return None
    more = shared(x)
    if is_same(seen.out, seen.made + more):
        return None
    for name, each in layer.get_submodule(block).named_modules():
        if type(each) is not torch.nn.Linear or each.out_features != 1:
            continue
        share = functional.linear(x, each.weight, each.bias).sigmoid()
        if is_same(seen.out, seen.made + share * more):
            return f"{block}.{name}"
    raise Unread("its shared expert is not simply added to the others")


def _tensor(layer: torch.nn.Module, name: str) -> torch.Tensor:
    module, _, own = name.rpartition(".")
    tensor: torch.Tensor = getattr(layer.get_submodule(module), own)
    return tensor.detach()
