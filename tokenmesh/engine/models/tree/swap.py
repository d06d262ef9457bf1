"""Parts of a module tree, replaced by our own: linear layers, norms, gated MLPs.

What a part computes is found by recording one pass and by trying it on numbers. Weights are packed
one group at a time, and the plain ones are given up at once: memory peaks at the weights plus one.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

import torch

from tokenmesh.engine.layers.mlp import activated
from tokenmesh.engine.models.tree.part_sums import sum_of
from tokenmesh.engine.models.tree.quantized.codes import codes_of
from tokenmesh.engine.models.tree.recognise import (
    Calls,
    Gated,
    Norm,
    gated_of,
    is_plain_product,
    norm_of,
)
from tokenmesh.kernels.linear import Linear, linear, pack, pack_codes
from tokenmesh.kernels.moe.cpu import activated as activated_in_float32
from tokenmesh.kernels.moe.spec import ExpertsSpec
from tokenmesh.kernels.native import NativeWeight
from tokenmesh.kernels.rms_norm import rms_norm
from tokenmesh.shared.allocator import trim_heap

MIN_ELEMENTS: Final = 1 << 14
"""Below this, calling our product costs more than it saves; not so for bfloat16 in C, as torch's
smallest products of it take some 40 microseconds."""

logger = logging.getLogger(__name__)


def swap(modules: list[torch.nn.Module], calls: Calls, native: bool) -> None:
    """Replace parts of `modules`, parents first. calls: of one pass over them.

    native: the C kernels have been started.
    """
    linears = replaceable(modules, calls)
    tables = [each for each in modules if is_plain_table(each)]
    counts = {"gated MLPs": 0, "products": 0, "linear layers": 0, "norms": 0, "own products": 0}
    for module in modules:
        num_packed = counts["gated MLPs"] + counts["products"]
        gated = gated_of(module, linears, calls)
        if gated is not None:
            _set_gated(module, gated, native)
            for each in (*gated.gate_up, gated.down):
                del linears[each]
            counts["gated MLPs"] += 1
        for group in _groups(module, linears, native):
            counts["products"] += 1
            counts["linear layers"] += len(group)
            _set_products(group, native, tables)
        norm = norm_of(module)
        if norm is not None:
            _set_norm(module, norm)
            counts["norms"] += 1
        if native:
            counts["own products"] += _set_own_products(module, calls)
        if num_packed != counts["gated MLPs"] + counts["products"]:
            trim_heap()
    logger.info("replaced %s", ", ".join(f"{count} {what}" for what, count in counts.items()))


def replaceable(
    modules: list[torch.nn.Module], calls: Calls
) -> dict[torch.nn.Linear, torch.Tensor]:
    """Linear layers that were called once and whose weight nothing else uses; what each got.

    A head may share the weight of an embedding.
    """
    tables = Counter(id(each.weight) for each in modules if isinstance(each, torch.nn.Embedding))
    found = {}
    for module in modules:
        call = calls.only(module)
        if type(module) is torch.nn.Linear and call is not None and call.x is not None:
            uses = calls.uses[id(module.weight)] - tables[id(module.weight)]
            is_own = "forward" not in vars(module) and uses == 1
            bias: torch.Tensor | None = module.bias
            if is_own and (bias is None or calls.uses[id(bias)] == 1):
                found[module] = call.x
    return found


def _groups(
    parent: torch.nn.Module, linears: dict[torch.nn.Linear, torch.Tensor], native: bool
) -> list[list[torch.nn.Linear]]:
    """Its own linear layers, those of the same input together; without the small ones."""
    by_input: dict[int, list[torch.nn.Linear]] = {}
    for child in parent.children():
        if isinstance(child, torch.nn.Linear) and child in linears:
            by_input.setdefault(id(linears.pop(child)), []).append(child)
    return [group for group in by_input.values() if _pays(group, native)]


def _pays(group: list[torch.nn.Linear], native: bool) -> bool:
    weights: list[torch.Tensor] = [each.weight for each in group]
    in_c = native and all(each.dtype == torch.bfloat16 for each in weights)
    return in_c or sum(each.numel() for each in weights) >= MIN_ELEMENTS


def _set_products(
    group: list[torch.nn.Linear], native: bool, tables: list[torch.nn.Embedding]
) -> None:
    sizes = [each.out_features for each in group]
    tied = [each for each in tables if len(group) == 1 and each.weight is group[0].weight]
    layer = packed(group, native)
    note_parts(group, layer)
    if isinstance(layer.weight, NativeWeight):
        for table in tied:
            _read_from(table, layer.weight)
    if len(group) == 1:
        run_by(group[0], lambda x: _by_row(linear, x, layer), layer)
        return
    merged = _Merged(layer, sizes)
    for number, each in enumerate(group):
        run_by(each, _part(merged, number), layer)


def is_plain_table(module: torch.nn.Module) -> TypeGuard[torch.nn.Embedding]:
    """Return whether a module does nothing but look up rows."""
    is_own = "forward" not in vars(module)
    return type(module) is torch.nn.Embedding and module.max_norm is None and is_own


def _read_from(table: torch.nn.Embedding, weight: NativeWeight) -> None:
    """Let an embedding read its rows from the head that it shares them with: they are kept once."""
    dtype, width = table.weight.dtype, weight.in_features
    module: Any = table
    module.forward = lambda ids: weight.rows(ids.reshape(-1), dtype).view(*ids.shape, width)
    empty = torch.empty_like(table.weight, device="meta")
    table.weight = torch.nn.Parameter(empty, requires_grad=False)


def note_parts(group: list[torch.nn.Linear], layer: Linear) -> None:
    """Note at each module which outputs of the layer are its own; see `part_of`."""
    first = 0
    for each in group:
        each.tokenmesh_part = (layer, first)  # type: ignore[assignment]
        first += each.out_features


def part_of(module: torch.nn.Linear) -> tuple[Linear, int] | None:
    """The layer that computes a module and its first output there; None: it was not replaced."""
    return vars(module).get("tokenmesh_part")


def _part(merged: "_Merged", number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: merged.part(number, x)


def packed(group: list[torch.nn.Linear], native: bool, order: torch.Tensor | None = None) -> Linear:
    """Take over linear layers that read the same input; outputs below each other or in `order`."""
    codes = codes_of(group) if native or group[0].weight.is_cuda else None
    weight, bias = taken(group)
    if order is not None:
        codes = None if codes is None else codes.rows(order.to(codes.numbers.device))
        weight = weight if codes is not None else weight[order.to(weight.device)]
        bias = None if bias is None else bias[order.to(bias.device)]
    if codes is not None:
        return pack_codes(codes, bias, weight.dtype, native)
    return pack(weight, bias, native)


def taken(group: list[torch.nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights and biases one below the other; their own stay as shapes without memory."""
    biases: list[torch.Tensor | None] = [each.bias for each in group]
    weights = [each.weight.detach() for each in group]
    bias = None
    if any(each is not None for each in biases):
        parts = zip(biases, weights, strict=True)
        bias = torch.cat([w.new_zeros(len(w)) if b is None else b.detach() for b, w in parts])
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    for each in group:
        empty = torch.empty_like(each.weight, device="meta")
        each.weight = torch.nn.Parameter(empty, requires_grad=False)
    return weight, bias


def _by_row(product: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any) -> torch.Tensor:
    """product of [T, I] -> [T, O], on x [..., I] -> [..., O]."""
    return product(x.reshape(-1, x.shape[-1]), *args).view(*x.shape[:-1], -1)


@dataclass(slots=True)
class _Merged:
    """One product for linear layers that are called one after the other on the same tensor."""

    layer: Linear
    sizes: list[int]
    _x: torch.Tensor | None = None
    """Held while a part is left, so that no other tensor has its identity."""
    _parts: list[torch.Tensor | None] = field(default_factory=list)

    def part(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """The result of one of them: x [..., I] -> [..., O]; each is handed out once."""
        part = self._parts[number] if x is self._x else None
        if part is None:
            out = _by_row(linear, x, self.layer)
            # contiguous, as their own would be: a caller may view them in any shape
            self._parts = [each.contiguous() for each in torch.split(out, self.sizes, dim=-1)]
            self._x, part = x, self._parts[number]
        assert part is not None
        self._parts[number] = None
        if all(each is None for each in self._parts):
            self._x = None
        return part


class PackedWeight(torch.Tensor):
    """A weight that `torch.nn.functional.linear` multiplies with in C.

    Routers call it themselves. For all else it is the plain weight, which stays with the panels.
    """

    layer: Linear

    @classmethod
    def of(cls, weight: torch.Tensor) -> "PackedWeight":
        """Pack a weight [O, I] that the C kernels can take."""
        packed: PackedWeight = weight.detach().as_subclass(cls)
        packed.layer = pack(weight.detach(), None, native=True)
        return packed

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and is_plain_product(args, kwargs):
            x, weight = args[:2]
            if isinstance(weight, cls) and not isinstance(x, cls) and x.dtype == weight.dtype:
                return _by_row(linear, x, weight.layer)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _set_own_products(module: torch.nn.Module, calls: Calls) -> int:
    """Pack the weights that a module multiplies with by its own code; how many they were."""
    found = [
        (name, weight)
        for name, weight in module.named_parameters(recurse=False)
        if type(module) is not torch.nn.Linear
        and weight.ndim == 2
        and calls.uses[id(weight)] == calls.products[id(weight)] == 1
        and NativeWeight.fits(weight)
    ]
    for name, weight in found:
        delattr(module, name)
        setattr(module, name, PackedWeight.of(weight))
    return len(found)


def _set_gated(module: torch.nn.Module, gated: Gated, native: bool) -> None:
    gate_up = packed(gated.gate_up, native)
    down = packed([gated.down], native)
    note_parts(gated.gate_up, gate_up)
    note_parts([gated.down], down)
    spec, total = gated.spec, sum_of(gated.down)

    def mlp(x: torch.Tensor) -> torch.Tensor:
        return total(linear(_activated(linear(x, gate_up), spec), down))

    run_by(module, lambda x: _by_row(mlp, x), gate_up, down)


def _activated(gate_up: torch.Tensor, spec: ExpertsSpec) -> torch.Tensor:
    match spec.activation:
        case "silu" | "gelu" | "gelu_tanh" as activation:
            return activated(gate_up, activation)
        case _:
            return activated_in_float32(gate_up.float(), spec).to(gate_up.dtype)


def run_by(module: Any, forward: Callable[[torch.Tensor], torch.Tensor], *own: object) -> None:
    """Replace the forward of this instance; attributes that others read stay.

    own: what holds its weights from now on, where `tensors_of` finds them.
    """
    module.forward = forward
    module.tokenmesh_own = own


def _set_norm(module: torch.nn.Module, norm: Norm) -> None:
    weight, eps = norm.weight, norm.eps
    run_by(module, lambda x: rms_norm(x, weight, eps), weight)
