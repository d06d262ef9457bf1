"""The specification of experts, in float64, one (token, expert) pair at a time."""

import torch
from torch.nn import functional

from tokenmesh.kernels.moe.device_experts import DeviceExperts
from tokenmesh.kernels.moe.spec import ExpertsSpec


def experts_reference(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor | DeviceExperts,
    w2: torch.Tensor | DeviceExperts,
    spec: ExpertsSpec,
) -> torch.Tensor:
    """As the package's `experts`, rounded once to x's dtype; takes plain weights and DeviceExperts,
    whose numbers are rounded to x's dtype first."""
    w13, w2 = (
        each if isinstance(each, torch.Tensor) else each.decoded().to(x.dtype) for each in (w13, w2)
    )
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            if 0 <= expert < w13.shape[0]:
                out[token] += weight * _one(x[token].double(), expert, w13, w2, spec)
    return out.to(x.dtype)


def _one(
    x: torch.Tensor, expert: int, w13: torch.Tensor, w2: torch.Tensor, spec: ExpertsSpec
) -> torch.Tensor:
    """x [H] -> [H]."""
    hidden = _linear(x, expert, w13, spec.b13, spec)
    return _linear(_activated(hidden, spec), expert, w2, spec.b2, spec)


def _linear(
    x: torch.Tensor, expert: int, w: torch.Tensor, bias: torch.Tensor | None, spec: ExpertsSpec
) -> torch.Tensor:
    weight = w[expert].double()
    out = x @ (weight if spec.is_transposed else weight.t())
    return out if bias is None else out + bias[expert].double()


def _activated(hidden: torch.Tensor, spec: ExpertsSpec) -> torch.Tensor:
    """[2I] -> [I], or [I] -> [I] without a gate."""
    if not spec.is_gated:
        return _activation(hidden, spec)
    if spec.is_interleaved:
        gate, up = hidden[0::2], hidden[1::2]
    else:
        gate, up = hidden.chunk(2)
    if spec.limit is not None:
        up = up.clamp(-spec.limit, spec.limit)
        if not spec.limits_activated_gate:
            gate = gate.clamp(max=spec.limit)
    gate = _activation(gate, spec)
    if spec.limit is not None and spec.limits_activated_gate:
        gate = gate.clamp(max=spec.limit)
    return gate * (up + spec.up_offset)


def _activation(x: torch.Tensor, spec: ExpertsSpec) -> torch.Tensor:
    match spec.activation:
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
