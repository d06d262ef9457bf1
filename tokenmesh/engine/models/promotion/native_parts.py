"""Projections and MLPs of a native layer, from the modules that a reading names."""

from typing import Any

import torch

from tokenmesh.engine.adapters.sites import AdapterSites, TurnedRows
from tokenmesh.engine.layers.mlp import Experts, Mlp
from tokenmesh.engine.models.promotion.read_layer import Reading
from tokenmesh.engine.models.tree.experts import prepare
from tokenmesh.engine.models.tree.part_sums import TAKEN
from tokenmesh.engine.models.tree.swap import packed
from tokenmesh.kernels.linear import Linear, pack
from tokenmesh.kernels.lora import LoraBank


class LayerSites:
    """Where the projections of one layer of a tree are announced to adapters."""

    def __init__(self, sites: AdapterSites, prefix: str) -> None:
        """`prefix`: the layer's path in the tree, and a dot."""
        self._sites = sites
        self._prefix = prefix

    def add(
        self,
        layer: torch.nn.Module,
        names: tuple[str, ...],
        linear: Linear,
        turned: TurnedRows | None = None,
    ) -> Linear:
        """`linear` is made of the modules `names` of `layer`."""
        modules: list[Any] = [layer.get_submodule(name) for name in names]
        sizes = [each.out_features for each in modules]
        paths = [self._prefix + name for name in names]
        taken = [vars(each).get(TAKEN) for each in modules]
        self._sites.add(linear, paths, sizes, modules[0].in_features, turned, taken)
        return linear

    def add_experts(self, name: str, module: Any) -> LoraBank:
        """A module of experts that was prepared; see `AdapterSites.add_experts`."""
        is_interleaved, path = module.tokenmesh_interleaved, self._prefix + name
        taken = vars(module).get(TAKEN)
        return self._sites.add_experts(
            path, *module.port, is_interleaved=is_interleaved, taken=taken
        )


def native_mlp(
    layer: torch.nn.Module, reading: Reading, native: bool, sites: LayerSites
) -> Mlp | Experts:
    """`native`: for the C kernels, which have been started."""
    experts = reading.experts
    if experts is None:
        return _mlp(layer, reading, native, sites)
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
        shared=_mlp(layer, reading, native, sites) if reading.down else None,
        shared_gate=None if gate is None else linear_of(layer, (gate,), native, sites),
        adapters=sites.add_experts(experts.experts, module),
    )


def _mlp(layer: torch.nn.Module, reading: Reading, native: bool, sites: LayerSites) -> Mlp:
    assert reading.down is not None
    return Mlp(
        gate_up=linear_of(layer, reading.gate_up, native, sites),
        down=linear_of(layer, (reading.down,), native, sites),
        activation=reading.activation,
    )


def linear_of(
    layer: torch.nn.Module, names: tuple[str, ...], native: bool, sites: LayerSites
) -> Linear:
    modules: Any = [layer.get_submodule(name) for name in names]
    return sites.add(layer, names, packed(modules, native))
