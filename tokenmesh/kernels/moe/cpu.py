"""Experts on a CPU: pairs of a token and an expert are sorted, and each expert runs once.

The C kernels do all of it in one call, on panels that replace the plain weights. Without them it is
two products of torch for each expert that is hit.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch.nn import functional

from tokenmesh.kernels.alignment import padded
from tokenmesh.kernels.codes import Codes
from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.moe.device_experts import DeviceExperts, Unfit
from tokenmesh.kernels.moe.routing import SCORES, Routing
from tokenmesh.kernels.moe.spec import ACTIVATIONS, ExpertsSpec
from tokenmesh.kernels.native import (
    AnyExperts,
    CodedExperts,
    Gate,
    NativeExperts,
    NativeWeight,
    Routed,
    RoutedTokens,
    native_experts,
)

Weights = torch.Tensor | AnyExperts | DeviceExperts
ExpertCodes = Callable[[int], Sequence[Codes] | None]
"""The codes [outputs, inputs] of an expert by its number: of gate and up, or of its one weight in
a product. None where an expert has none."""
MAX_PAIRS: Final = 4096
"""At a time, which bounds the memory between the two products."""

logger = logging.getLogger(__name__)


def pack(
    w13: torch.Tensor,
    w2: torch.Tensor,
    spec: ExpertsSpec,
    native: bool = False,
    codes: tuple[ExpertCodes | None, ExpertCodes | None] = (None, None),
) -> tuple[Weights, Weights, ExpertsSpec]:
    """The same experts as `experts` reads them fastest; the arguments may be dropped.

    `native`: the C kernels have been started. They, and those of a GPU, compute with codes in place
    of the weights where all experts have some that fit. Raises ValueError for shapes that do not
    fit.
    """
    _check(w13, w2, spec)
    straight13, straight2 = w13, w2
    if spec.is_transposed:
        straight13, straight2 = w13.transpose(1, 2), w2.transpose(1, 2)
    b13 = spec.b13
    if spec.is_interleaved:
        b13 = None if b13 is None else torch.cat((b13[:, 0::2], b13[:, 1::2]), dim=1)
    straight = replace(spec, is_transposed=False, is_interleaved=False, b13=b13)
    if uses_triton(w13):
        on_device13, on_device2 = (_on_device(*each) for each in zip(codes, (w13, w2), strict=True))
        if on_device13 is None:
            on_device13 = _aligned(_gates_first(straight13, spec))
        if on_device2 is None:
            on_device2 = _aligned(straight2)
        return on_device13, on_device2, straight
    if native and NativeExperts.fits(straight13) and NativeExperts.fits(straight2):
        first: Weights | None = _coded(codes[0], w13)
        if first is None:
            slices = 2 if spec.is_gated else 1
            first = NativeExperts.pack(_gates_first(straight13, spec), slices)
        second: Weights | None = _coded(codes[1], w2)
        if second is None:
            second = NativeExperts.pack(straight2, 1)
        return first, second, straight
    return w13, w2, spec


def slices_of(stack: torch.Tensor, expert: int, spec: ExpertsSpec) -> tuple[torch.Tensor, ...]:
    """Views [outputs, inputs] of gate and up of an expert; of its one weight without a gate."""
    own = weight_of(stack, expert, spec)
    if not spec.is_gated:
        return (own,)
    return (own[0::2], own[1::2]) if spec.is_interleaved else tuple(own.chunk(2))


def weight_of(stack: torch.Tensor, expert: int, spec: ExpertsSpec) -> torch.Tensor:
    """A view [outputs, inputs] of one expert."""
    return stack[expert].t() if spec.is_transposed else stack[expert]


def _gates_first(stack: torch.Tensor, spec: ExpertsSpec) -> torch.Tensor:
    """[E, 2I, H] with gate and up by turns, where they are so -> with all gates first."""
    if not spec.is_interleaved:
        return stack
    return torch.cat((stack[:, 0::2], stack[:, 1::2]), dim=1)


def _coded(codes: ExpertCodes | None, stack: torch.Tensor) -> CodedExperts | None:
    if codes is None:
        return None
    count = len(stack)

    def each() -> Iterator[Sequence[Codes]]:
        for expert in range(count):
            slices = codes(expert)
            if slices is None or not all(CodedExperts.fits(one, stack.dtype) for one in slices):
                raise Unfit
            yield slices

    try:
        return CodedExperts.pack(each(), stack.dtype, count)
    except Unfit:
        return None


def _on_device(codes: ExpertCodes | None, stack: torch.Tensor) -> Weights | None:
    if codes is None:
        return None
    try:
        each = (codes(expert) for expert in range(len(stack)))
        return DeviceExperts.pack(each, len(stack), stack.device)
    except Unfit as error:
        logger.warning("the weights of experts are decoded, which saves no memory: %s", error)
        return None


def _aligned(stack: torch.Tensor) -> torch.Tensor:
    """[E, outputs, inputs] in rows that begin at multiples of what kernels want."""
    width = stack.shape[-1]
    if width == padded(width):
        return stack.contiguous()
    wide = stack.new_empty(*stack.shape[:-1], padded(width))[..., :width]
    return wide.copy_(stack)


def _check(w13: torch.Tensor, w2: torch.Tensor, spec: ExpertsSpec) -> None:
    outputs, inputs = (-1, -2) if spec.is_transposed else (-2, -1)
    inner = w2.shape[inputs] * (2 if spec.is_gated else 1)
    shapes = (w13.shape[0], w13.shape[outputs], w13.shape[inputs])
    if shapes != (w2.shape[0], inner, w2.shape[outputs]):
        raise ValueError(f"experts of {tuple(w13.shape)} and {tuple(w2.shape)} do not fit: {spec}")
    for bias, rows in ((spec.b13, inner), (spec.b2, w2.shape[outputs])):
        if bias is not None and bias.shape != (w13.shape[0], rows):
            raise ValueError(f"a bias of {tuple(bias.shape)} does not fit {tuple(w13.shape)}")


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: Weights,
    w2: Weights,
    spec: ExpertsSpec,
) -> torch.Tensor:
    num_tokens = max(1, MAX_PAIRS // max(1, ids.shape[1]))
    slices = [slice(i, i + num_tokens) for i in range(0, x.shape[0], num_tokens)]
    outs = [_some(x[each], ids[each], weights[each], w13, w2, spec) for each in slices]
    return outs[0] if len(outs) == 1 else torch.cat([x.new_empty((0, x.shape[1])), *outs])


def _some(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: Weights,
    w2: Weights,
    spec: ExpertsSpec,
) -> torch.Tensor:
    if isinstance(w13, torch.Tensor) and isinstance(w2, torch.Tensor):
        return _by_torch(x, ids, weights, w13, w2, spec)
    assert isinstance(w13, AnyExperts)
    assert isinstance(w2, AnyExperts)
    return native_experts(x, ids, weights, w13, spec.b13, w2, spec.b2, _gate_of(spec))


def _gate_of(spec: ExpertsSpec) -> Gate:
    return Gate(
        activation=ACTIVATIONS.index(spec.activation),
        alpha=spec.alpha,
        limit=math.inf if spec.limit is None else spec.limit,
        limits_activated_gate=spec.limits_activated_gate,
        up_offset=spec.up_offset,
    )


def routed(
    router: NativeWeight,
    correction: torch.Tensor | None,
    routing: Routing,
    w13: AnyExperts,
    w2: AnyExperts,
    spec: ExpertsSpec,
) -> Routed:
    """`route` and `experts` as one operation of a program; router and correction as in `route`.

    Logits are in the router's dtype: that of the experts, or float32.
    """
    choice = RoutedTokens(
        top_k=routing.top_k,
        scores=SCORES.index(routing.scores),
        is_normalized=routing.is_normalized,
        scale=routing.scale,
    )
    return Routed.of(router, correction, choice, w13, spec.b13, w2, spec.b2, _gate_of(spec))


def _by_torch(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    spec: ExpertsSpec,
) -> torch.Tensor:
    num_experts, top_k = w13.shape[0], ids.shape[1]
    flat = ids.reshape(-1)
    if bool(((flat < -1) | (flat > num_experts)).any()):
        raise IndexError(f"an expert's id is not from -1 to {num_experts}")
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = x.new_zeros((len(flat), x.shape[1]), dtype=wide)
    factors = weights.reshape(-1, 1).to(wide)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat + 1, minlength=num_experts + 2).tolist()
    places = torch.split(order, counts)[1:-1]  # the first and the last are not here
    for expert, pairs in enumerate(places):
        if len(pairs):
            b13 = None if spec.b13 is None else spec.b13[expert]
            b2 = None if spec.b2 is None else spec.b2[expert]
            hidden = _linear(x[pairs // top_k], w13[expert], b13, spec)
            hidden = activated(hidden.to(wide), spec).to(x.dtype)
            parts[pairs] = _linear(hidden, w2[expert], b2, spec).to(wide) * factors[pairs]
    return parts.view(*ids.shape, -1).sum(1).to(x.dtype)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, spec: ExpertsSpec
) -> torch.Tensor:
    return functional.linear(x, weight.t() if spec.is_transposed else weight, bias)


def activated(hidden: torch.Tensor, spec: ExpertsSpec) -> torch.Tensor:
    """Compute the part between the two products: [T, 2I], or [T, I] without a gate, -> [T, I]."""
    if not spec.is_gated:
        return _activation(hidden, spec)
    gate, up = hidden.chunk(2, dim=-1)
    if spec.is_interleaved:
        gate, up = hidden[..., 0::2], hidden[..., 1::2]
    if spec.limit is not None:
        up = up.clamp(-spec.limit, spec.limit)
    if spec.limit is not None and not spec.limits_activated_gate:
        gate = gate.clamp(max=spec.limit)
    gate = _activation(gate, spec)
    if spec.limit is not None and spec.limits_activated_gate:
        gate = gate.clamp(max=spec.limit)
    return gate * (up + spec.up_offset)


def _activation(x: torch.Tensor, spec: ExpertsSpec) -> torch.Tensor:
    match spec.activation:
        case "silu" if spec.alpha == 1.0:
            return functional.silu(x)
        case "silu":
            return x * torch.sigmoid(spec.alpha * x)
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case "relu":
            return torch.relu(x)
        case "relu2":
            return torch.relu(x).square()
