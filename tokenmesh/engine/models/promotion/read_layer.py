"""A layer of a module tree read as a native one: which module plays which part, and how.

Parts are found by following tensors through one float32 pass and by trying formulas on numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from tokenmesh.engine.layers.mlp import Activation
from tokenmesh.engine.layers.rotary import Rotary
from tokenmesh.engine.models.promotion.read_experts import (
    ExpertsReading,
    find_experts,
    read_experts,
)
from tokenmesh.engine.models.promotion.read_heads import (
    Heads,
    Ropes,
    Spy,
    Unread,
    read_heads,
)
from tokenmesh.engine.models.tree.attention import PORT, Port
from tokenmesh.engine.models.tree.recognise import (
    Call,
    Calls,
    Gated,
    Norm,
    gated_of,
    is_same,
    norm_of,
    record,
)
from tokenmesh.engine.models.tree.swap import replaceable

_FIT: Final = 1e-4
_HIDDEN: Final = "hidden_states"


@dataclass(frozen=True, slots=True)
class LayerCall:
    """It says how a tree calls one of its layers."""

    args: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def given(self) -> list[Any]:
        """All that the layer is given besides hidden states."""
        if _HIDDEN in self.named:
            return [*self.args, *(v for name, v in self.named.items() if name != _HIDDEN)]
        return [*self.args[1:], *self.named.values()]

    def run(self, layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [1, T, H] -> [1, T, H]."""
        if _HIDDEN in self.named:
            out = layer(*self.args, **{**self.named, _HIDDEN: hidden})
        else:
            out = layer(hidden, *self.args[1:], **self.named)
        if not isinstance(out, torch.Tensor):
            raise Unread("a layer returns more than one tensor")
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A layer's parts, by their names within it."""

    heads: Heads
    sinks: str | None
    """The parameter: one value for each query head."""
    out: str
    gate_up: tuple[str, ...]
    down: str | None
    """Projections of its gated MLP, or of the shared expert; () and None: there is neither."""
    experts: ExpertsReading | None
    attention_norm: str | None
    attention_post_norm: str | None
    mlp_norm: str | None
    mlp_post_norm: str | None
    eps: float
    intermediate_size: int
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    activation: Activation
    residual_multiplier: float
    output: torch.Tensor
    """[1, T, H] what it makes of the hidden states that it was read with."""


def read_layer(
    layer: torch.nn.Module,
    call: LayerCall,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    rotaries: Sequence[Rotary],
) -> Reading:
    """Read a layer, in float32, by one pass over hidden [1, T, H]. Raises Unread.

    Its run has begun a step; positions [T] are those that the call has turns of.
    """
    return _Reader(layer, call, hidden, positions, rotaries).read()


def _tensors_of(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name: layers of one kind may differ in either."""
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


class _Reader:
    def __init__(
        self,
        layer: torch.nn.Module,
        call: LayerCall,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        rotaries: Sequence[Rotary],
    ) -> None:
        self._layer = layer
        self._names = {module: name for name, module in layer.named_modules()}
        self._parameters = {id(p): name for name, p in layer.named_parameters()}
        self._modules = {name: module for module, name in self._names.items()}
        self._hidden, self._ropes = hidden, Ropes(positions, rotaries)
        (self._attention,) = (each for each in self._names if PORT in vars(each))
        port = getattr(self._attention, PORT)
        if not isinstance(port, Port):
            raise Unread("its attention keeps latents")
        self._spy = Spy(port)
        setattr(self._attention, PORT, self._spy)
        out: list[torch.Tensor] = []
        self._calls: Calls = record(self._names, lambda: out.append(call.run(layer, hidden)))
        setattr(self._attention, PORT, port)
        (self._output,) = out
        self._linears = replaceable(list(self._names), self._calls)
        found = ((each, norm_of(each)) for each in self._names)
        self._norms: dict[torch.nn.Module, Norm] = {m: n for m, n in found if n is not None}
        self._multipliers = [v for v in vars(layer).values() if isinstance(v, float)]

    def read(self) -> Reading:
        call, out = self._call(self._attention), self._output_projection()
        before, hidden = self._norm_before(call.x)
        if hidden is not self._hidden:
            raise Unread("its attention does not read the layer's input")
        after, added = self._norm_after(call.out)
        mlp, gated, experts = self._mlp()
        mlp_call = self._call(mlp)
        mlp_before, middle = self._norm_before(mlp_call.x)
        mlp_after, mlp_added = self._norm_after(mlp_call.out)
        multiplier = self._multiplier(middle - hidden, added)
        if not is_same(self._output, middle + multiplier * mlp_added):
            raise Unread("its MLP's result is not simply added")
        heads = read_heads(self._projections(call.x), self._own_norms(), self._spy, self._ropes)
        sinks = self._sinks(heads)
        own = {self._modules[name] for name in heads.norms}
        used = own | {each for each in (before, after, mlp_before, mlp_after) if each is not None}
        if len({self._norms[norm].eps for norm in used}) != 1:
            raise Unread("its norms differ in eps")
        own_linears = [] if gated is None else [*gated.gate_up, gated.down]
        known = {out, *own_linears, *used, *(self._modules[name] for name in heads.qkv)}
        parameters = {id(p) for module in known for p in module.parameters()} | {id(sinks)}
        if experts is not None:
            parameters |= self._parameters_of(experts)
        if any(id(own) not in parameters for own in _tensors_of(self._layer).values()):
            raise Unread("it has weights besides those of a plain layer")
        return Reading(
            heads=heads,
            sinks=None if sinks is None else self._parameters[id(sinks)],
            out=self._names[out],
            gate_up=tuple(self._names[each] for each in own_linears[:-1]),
            down=self._names[own_linears[-1]] if own_linears else None,
            experts=experts,
            attention_norm=self._name(before),
            attention_post_norm=self._name(after),
            mlp_norm=self._name(mlp_before),
            mlp_post_norm=self._name(mlp_after),
            eps=next(self._norms[norm].eps for norm in used),
            intermediate_size=0 if gated is None else gated.down.in_features,
            qkv_bias=any(self._has_bias(name) for name in heads.qkv),
            out_bias=out.bias is not None,
            mlp_bias=any(each.bias is not None for each in own_linears),
            activation=self._activation(gated),
            residual_multiplier=multiplier,
            output=self._output,
        )

    def _call(self, module: torch.nn.Module) -> Call:
        call = self._calls.only(module)
        if call is None:
            raise Unread(f"{self._names[module]} is not called once")
        return call

    def _output_projection(self) -> torch.nn.Linear:
        made = self._call(self._attention).out
        for linear in self._linears:
            if self._call(linear).out is made:
                return linear
        raise Unread("its attention does not end with a projection")

    def _mlp(self) -> tuple[torch.nn.Module, Gated | None, ExpertsReading | None]:
        """The module of the MLP, with the gated MLP and the experts in it."""
        found = self._gated()
        names = find_experts(self._layer)
        if names is None:
            if len(found) != 1:
                raise Unread("it has no gated MLP" if not found else "it has several gated MLPs")
            return *found[0], None
        if len(found) > 1:
            raise Unread("several gated MLPs are alongside its experts")
        shared, gated = found[0] if found else (None, None)
        experts = read_experts(self._layer, *names, shared)
        return self._modules[experts.block], gated, experts

    def _gated(self) -> list[tuple[torch.nn.Module, Gated]]:
        found = []
        for module in self._names:
            gated = gated_of(module, self._linears, self._calls)
            if gated is not None:
                found.append((module, gated))
        return found

    def _parameters_of(self, experts: ExpertsReading) -> set[int]:
        modules = [self._modules[experts.experts]]
        if experts.shared_gate is not None:
            modules.append(self._modules[experts.shared_gate])
        named = _tensors_of(self._layer)
        names = (experts.router, experts.bias, experts.correction)
        own = [named[name] for name in names if name in named]
        return {id(p) for p in (*own, *(p for m in modules for p in m.parameters()))}

    def _activation(self, gated: Gated | None) -> Activation:
        match "silu" if gated is None else gated.spec.activation:
            case "silu" | "gelu" | "gelu_tanh" as activation:
                return activation
            case other:
                raise Unread(f"its MLP's activation is {other}")

    def _norm_before(self, x: torch.Tensor | None) -> tuple[torch.nn.Module | None, torch.Tensor]:
        """The norm that made x, and what it was made from; without a norm x itself."""
        assert x is not None
        for norm in self._norms:
            call = self._calls.only(norm)
            if call is not None and call.out is x:
                assert call.x is not None
                return norm, call.x
        return None, x

    def _norm_after(self, x: torch.Tensor | None) -> tuple[torch.nn.Module | None, torch.Tensor]:
        """The norm that x is given to, and its result; without a norm x itself."""
        assert x is not None
        for norm in self._norms:
            call = self._calls.only(norm)
            if call is not None and call.x is x:
                assert call.out is not None
                return norm, call.out
        return None, x

    def _multiplier(self, difference: torch.Tensor, added: torch.Tensor) -> float:
        fit = float((difference * added).sum() / (added * added).sum())
        near = [value for value in (1.0, *self._multipliers) if abs(value - fit) < _FIT]
        if not near:
            raise Unread("its attention's result is not simply added")
        return near[0]

    def _projections(self, x: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Results of the projections of the attention's input."""
        found = {}
        for linear, given in self._linears.items():
            made = self._call(linear).out
            if given is x and made is not None:
                found[self._names[linear]] = made
        return found

    def _sinks(self, heads: Heads) -> torch.Tensor | None:
        sinks = self._spy.sinks
        if sinks is None:
            return None
        if id(sinks) not in self._parameters or sinks.shape != (heads.num_heads,):
            raise Unread("its attention's sinks are not a weight for each head")
        return sinks

    def _has_bias(self, name: str) -> bool:
        return getattr(self._modules[name], "bias", None) is not None

    def _own_norms(self) -> dict[str, Norm]:
        inside = set(self._attention.modules())
        return {self._names[m]: norm for m, norm in self._norms.items() if m in inside}

    def _name(self, module: torch.nn.Module | None) -> str | None:
        return None if module is None else self._names[module]
