"""Layers of encoders as a few calls of C kernels: attention and MLP, each added to its input and
normalized, as in BERT and RoBERTa.

A layer is found by the order of its parts in one pass, and must give that pass's result by the
formula below: names of modules do not count. Other layers stay as they are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.functional import gelu, layer_norm, linear

from tokenmesh.engine.models.tree.pooling.native_parts import is_gelu
from tokenmesh.engine.models.tree.pooling.rows import PORT, RowsPort
from tokenmesh.engine.models.tree.recognise import Calls
from tokenmesh.engine.models.tree.swap import note_parts, run_by, taken
from tokenmesh.kernels.linear import Linear
from tokenmesh.kernels.lora import add_lora
from tokenmesh.kernels.native import (
    NativeShorts,
    NativeWeight,
    fits_rows,
    native_gelu,
    native_layer_norm,
    native_row_attention,
)

_SAME: Final = 1e-4
"""Largest relative difference of two float32 forms of a layer."""
_SAME_HALF: Final = 0.03
_NUM_LINEAR: Final = 6
"""It counts the linear layers of queries, keys, values, attention's output, and the two of the
MLP."""


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """The parts of a layer, as modules."""

    qkv: list[torch.nn.Linear]
    out: torch.nn.Linear
    attention_norm: torch.nn.LayerNorm
    up: torch.nn.Linear
    down: torch.nn.Linear
    mlp_norm: torch.nn.LayerNorm
    port: RowsPort
    head_dim: int
    scale: float

    def states(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's formula by torch: x [T, H] -> [T, H]."""
        heads = [
            linear(x, each.weight, each.bias).view(1, len(x), -1, self.head_dim).transpose(1, 2)
            for each in self.qkv
        ]
        mixed = self.port.attend(heads[0], heads[1], heads[2], self.scale).reshape(len(x), -1)
        hidden = _normed(self.attention_norm, x + linear(mixed, self.out.weight, self.out.bias))
        inner = gelu(linear(hidden, self.up.weight, self.up.bias))
        return _normed(self.mlp_norm, hidden + linear(inner, self.down.weight, self.down.bias))


def _normed(norm: torch.nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    return layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


@dataclass(frozen=True, slots=True, eq=False)
class _Product:
    """A linear layer whose result goes where the caller wants it."""

    layer: Linear
    """Has the adapters."""
    weight: NativeWeight | NativeShorts
    """The layer's own."""

    def into(self, x: torch.Tensor, out: torch.Tensor, has_gelu: bool = False) -> None:
        """x [T, I] -> out [T, O], contiguous, with GELU applied or without."""
        bank = self.layer.adapters
        is_adapted = bank is not None and bank.step.rows is not None
        self.weight.product_into(x, out, has_gelu and not is_adapted)
        if is_adapted:
            add_lora(x, out, bank)
            if has_gelu:
                native_gelu(out, out)


@dataclass(frozen=True, slots=True, eq=False)
class EncoderLayer:
    """A layer's weights, packed. Its results between the calls lie in `RowsRun.room`."""

    qkv: _Product
    out: _Product
    up: _Product
    down: _Product
    attention_norm: torch.nn.LayerNorm
    mlp_norm: torch.nn.LayerNorm
    port: RowsPort
    head_dim: int
    scale: float

    def states(self, x: torch.Tensor) -> torch.Tensor:
        """x [1, T, H] -> a new tensor of its shape."""
        run, x = self.port.run, x.contiguous()
        tokens, width = x.shape[1:]
        assert run.firsts is not None, "the C kernels know the rows of the step"
        wide = run.room("qkv", x, 3 * width)
        self.qkv.into(x[0], wide)
        query, key, value = (
            each.view(1, tokens, -1, self.head_dim).transpose(1, 2)
            for each in torch.split(wide, width, dim=1)
        )
        mixed = run.room("mixed", x, width)
        native_row_attention(
            query,
            key,
            value,
            run.firsts,
            self.port.window,
            self.scale,
            out=mixed.view(1, tokens, -1, self.head_dim),
        )
        hidden = run.room("hidden", x, width)
        self.out.into(mixed, hidden)
        _norm_sum(self.attention_norm, hidden, x[0], hidden)
        inner = run.room("inner", x, self.up.weight.out_features)
        self.up.into(hidden, inner, has_gelu=True)
        self.down.into(inner, mixed)
        out = torch.empty_like(x)
        _norm_sum(self.mlp_norm, mixed, hidden, out[0])
        return out


def _norm_sum(
    norm: torch.nn.LayerNorm, x: torch.Tensor, added: torch.Tensor, out: torch.Tensor
) -> None:
    native_layer_norm(x, norm.weight, norm.bias, norm.eps, added, out)


def take_layers(
    modules: Sequence[torch.nn.Module], calls: Calls, *, is_exact: bool
) -> set[torch.nn.Module]:
    """Replace the forward of each layer that the C kernels compute whole.

    calls: of one pass over `modules`, of rows that their `RowsRun` holds. is_exact: float32 weights
    stay float32. Returns the modules that these layers are made of, which compute nothing any more.
    """
    inside: set[torch.nn.Module] = set()
    for module in modules:
        if module in inside:
            continue
        found = _layer_of(module, calls)
        if found is not None and _is_same(found, module, calls):
            inside |= set(module.modules())
            _replace(module, found, is_exact)
    return inside


def _layer_of(module: torch.nn.Module, calls: Calls) -> _Found | None:
    """The parts of a layer, by the order in which they were called; None: it is not one."""
    call, within = calls.only(module), set(module.modules())
    if call is None or call.x is None or call.out is None or not call.is_tensor:
        return None
    if call.x.shape != call.out.shape:
        return None
    ports = [each for each in within if isinstance(vars(each).get(PORT), RowsPort)]
    parts = [each for each in calls.by_module if each in within and _is_part(each)]
    linears = [each for each in parts if type(each) is torch.nn.Linear]
    if len(ports) != 1 or len(linears) != _NUM_LINEAR or not _have_order(parts):
        return None
    if any(calls.only(each) is None for each in parts):
        return None
    norms = [each for each in parts if type(each) is torch.nn.LayerNorm]
    attention: Any = ports[0]
    width = call.x.shape[-1]
    dim = getattr(attention, "attention_head_size", None) or getattr(attention, "head_dim", None)
    shapes = [tuple(each.weight.shape) for each in linears]
    inner = linears[4].out_features
    wanted = [(width, width)] * 4 + [(inner, width), (width, inner)]
    if (
        not isinstance(dim, int)
        or width % dim
        or shapes != wanted
        or call.out.shape != call.x.shape
    ):
        return None
    if sum(len(list(each.parameters())) for each in parts) != len(list(module.parameters())):
        return None
    return _Found(
        qkv=linears[:3],
        out=linears[3],
        attention_norm=norms[0],
        up=linears[4],
        down=linears[5],
        mlp_norm=norms[1],
        port=vars(attention)[PORT],
        head_dim=dim,
        scale=getattr(attention, "scaling", dim**-0.5),
    )


def _is_part(module: torch.nn.Module) -> bool:
    return type(module) in (torch.nn.Linear, torch.nn.LayerNorm) or is_gelu(module)


def _have_order(parts: Sequence[torch.nn.Module]) -> bool:
    kinds = [type(each) for each in parts if not is_gelu(each)]
    one, norm = torch.nn.Linear, torch.nn.LayerNorm
    gelus = [index for index, each in enumerate(parts) if is_gelu(each)]
    return kinds == [one, one, one, one, norm, one, one, norm] and gelus == [6]


def _is_same(found: _Found, module: torch.nn.Module, calls: Calls) -> bool:
    """Return whether the formula gives what the module gave."""
    call = calls.only(module)
    assert call is not None
    assert call.x is not None
    assert call.out is not None
    if call.x.dim() != 3 or call.x.shape[0] != 1:
        return False
    head = call.x.new_empty(1, 1, call.x.shape[1], found.head_dim)
    if not fits_rows(head, head, head):
        return False
    ours, expected = found.states(call.x[0]).float(), call.out[0].float()
    limit = _SAME if call.x.dtype == torch.float32 else _SAME_HALF
    return bool((ours - expected).norm() <= limit * expected.norm())


def _replace(module: torch.nn.Module, found: _Found, is_exact: bool) -> None:
    layer = EncoderLayer(
        qkv=_packed(found.qkv, is_exact),
        out=_packed([found.out], is_exact),
        up=_packed([found.up], is_exact),
        down=_packed([found.down], is_exact),
        attention_norm=found.attention_norm,
        mlp_norm=found.mlp_norm,
        port=found.port,
        head_dim=found.head_dim,
        scale=found.scale,
    )
    run_by(module, lambda x, *_args, **_named: layer.states(x), layer)


def round_products(modules: Iterable[torch.nn.Module]) -> None:
    """Turn float32 weights that `swap` has packed for the C kernels into 16-bit integers."""
    for module in modules:
        for layer in getattr(module, "tokenmesh_own", ()):
            weight = layer.weight if isinstance(layer, Linear) else None
            if not isinstance(weight, NativeWeight):
                continue
            plain = weight.rows(torch.arange(weight.out_features), weight.panels.dtype)
            if NativeShorts.fits(plain):
                layer.weight = NativeShorts.pack(plain, weight.bias)


def _packed(group: list[torch.nn.Linear], is_exact: bool) -> _Product:
    weight, bias = taken(group)
    is_rounded = not is_exact and NativeShorts.fits(weight)
    packed = (NativeShorts if is_rounded else NativeWeight).pack(weight, bias)
    layer = Linear(packed)
    note_parts(group, layer)
    return _Product(layer, packed)
