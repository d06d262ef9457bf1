"""Adapters of experts, on a CPU: tokens that have one go through their experts one by one.

What an adapter adds to the first product changes the activation, so a token's experts run either
all with the adapter or all without it.
"""

from dataclasses import dataclass

import torch

from tokenmesh.kernels.lora.bank import LoraBank
from tokenmesh.kernels.lora.weights import AdapterRows, LoraExperts
from tokenmesh.kernels.moe import DeviceExperts, ExpertsSpec, Weights, activated, experts, weight_of


def experts_with_lora(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: Weights,
    w2: Weights,
    spec: ExpertsSpec,
    bank: LoraBank | None,
) -> torch.Tensor:
    """As `moe.experts`, with what the adapters of the step at work add to both products."""
    rows = None if bank is None else bank.step.rows
    if bank is None or not isinstance(rows, AdapterRows):
        return experts(x, ids, weights, w13, w2, spec)
    changed = [
        (adapter.experts[bank.number], tokens)
        for adapter, tokens in zip(rows.adapters, rows.indices, strict=True)
        if bank.number in adapter.experts
    ]
    if not changed:
        return experts(x, ids, weights, w13, w2, spec)
    others = ids.clone()
    for _, tokens in changed:
        others[tokens] = -1
    out = experts(x, others, weights, w13, w2, spec)
    layer = _Layer(w13, w2, spec)
    for adapter, tokens in changed:
        out[tokens] = layer.run(x[tokens], ids[tokens], weights[tokens], adapter)
    return out


@dataclass(frozen=True, slots=True)
class _Layer:
    w13: Weights
    w2: Weights
    spec: ExpertsSpec

    def run(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, adapter: LoraExperts
    ) -> torch.Tensor:
        """x [T, H], ids and weights [T, k] -> [T, H]."""
        spec = self.spec
        wide = torch.promote_types(x.dtype, torch.float32)
        out = torch.zeros(x.shape, dtype=wide)
        for expert in sorted(set(ids.flatten().tolist())):
            if not 0 <= expert < adapter.num_experts:
                continue
            tokens, places = (ids == expert).nonzero(as_tuple=True)
            own = x[tokens]
            b13 = None if spec.b13 is None else spec.b13[expert]
            b2 = None if spec.b2 is None else spec.b2[expert]
            hidden = _product(self.w13, expert, own, b13, spec)
            if adapter.a13 is not None and adapter.b13 is not None:
                hidden = hidden + (own @ adapter.a13[expert].t()) @ adapter.b13[expert]
            hidden = activated(hidden.to(wide), spec).to(x.dtype)
            made = _product(self.w2, expert, hidden, b2, spec)
            if adapter.a2 is not None and adapter.b2 is not None:
                made = made + (hidden @ adapter.a2[expert].t()) @ adapter.b2[expert]
            factors = weights[tokens, places].to(wide)
            out.index_add_(0, tokens, made.to(wide) * factors[:, None])
        return out.to(x.dtype)


def _product(
    weights: Weights, expert: int, x: torch.Tensor, bias: torch.Tensor | None, spec: ExpertsSpec
) -> torch.Tensor:
    """One expert: x [T, I] -> [T, O], in the order of `spec`."""
    if isinstance(weights, torch.Tensor):
        return torch.nn.functional.linear(x, weight_of(weights, expert, spec), bias)
    assert not isinstance(weights, DeviceExperts)
    out = weights.product(expert, x)
    return out if bias is None else out + bias
