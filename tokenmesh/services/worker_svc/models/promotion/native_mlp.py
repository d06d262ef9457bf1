"""The weights of a layer's MLP or experts, taken over by a native layer."""

from typing import Any

import torch

from tokenmesh.kernels.linear import Linear, pack
from tokenmesh.services.worker_svc.layers.experts import Experts
from tokenmesh.services.worker_svc.layers.mlp import Mlp
from tokenmesh.services.worker_svc.models.hf.experts import prepare
from tokenmesh.services.worker_svc.models.hf.swap import taken
from tokenmesh.services.worker_svc.models.promotion.read_layer import Reading


def native_mlp(layer: torch.nn.Module, reading: Reading, native: bool) -> Mlp | Experts:
    """`native`: for the C kernels, which have been started."""
    experts = reading.experts
    if experts is None:
        return _mlp(layer, reading, native)
    weight, bias = experts.router_of(layer)
    if experts.is_wide:
        weight, bias = weight.float(), None if bias is None else bias.float()
    gate = experts.shared_gate
    module: Any = layer.get_submodule(experts.experts)
    prepare(module, native)
    w13, w2, spec = module.port
    return Experts(
        routing=experts.routing,
        router=pack(weight, bias, native),
        is_wide=experts.is_wide,
        correction=experts.correction_of(layer),
        w13=w13,
        w2=w2,
        spec=spec,
        shared=_mlp(layer, reading, native) if reading.down else None,
        shared_gate=None if gate is None else _linear(layer, (gate,), native),
    )


def _mlp(layer: torch.nn.Module, reading: Reading, native: bool) -> Mlp:
    assert reading.down is not None
    return Mlp(
        gate_up=_linear(layer, reading.gate_up, native),
        down=_linear(layer, (reading.down,), native),
        activation=reading.activation,
    )


def _linear(layer: torch.nn.Module, names: tuple[str, ...], native: bool) -> Linear:
    return pack(*taken([layer.get_submodule(name) for name in names]), native)  # type: ignore[misc]
