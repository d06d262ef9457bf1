"""Experts of transformers' module trees, run by our op: `tokenmesh` in its experts interface.

A module says how its weights lie; what is between its products is found by trying it on numbers.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Final

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tokenmesh.engine.models.tree.quantized.deferred_experts import settle
from tokenmesh.engine.models.tree.quantized.expert_codes import (
    expert_codes,
    first_name,
    is_experts,
)
from tokenmesh.engine.models.tree.recognise import gates, is_same_gate
from tokenmesh.kernels.lora.experts import experts_with_lora
from tokenmesh.kernels.moe import ACTIVATIONS, ExpertsSpec, activated, pack
from tokenmesh.shared.allocator import trim_heap

NAME: Final = "tokenmesh"

logger = logging.getLogger(__name__)


def take_over(tree: torch.nn.Module, native: bool) -> None:
    """Let our op run all experts of a tree; those that it does not know run as they are.

    native: the C kernels have been started.
    """
    for module in list(tree.modules()):
        if is_experts(module):
            try:
                prepare(module, native)
            except ValueError as error:
                logger.warning("%s; they run as transformers has them", error)
            trim_heap()


def prepare(module: Any, native: bool) -> None:
    """Pack a module's weights, in their place; `native`: the C kernels have been started.

    Raises ValueError for experts that the op does not know.
    """
    settle(module)
    spec = spec_of(module)
    first = first_name(module)
    w13, w2 = getattr(module, first).detach(), module.down_proj.detach()
    codes = expert_codes(module, w13, w2, spec)
    module.tokenmesh_interleaved = spec.is_interleaved
    module.port = pack(w13, w2, spec, native, codes)
    for name in (first, "down_proj"):
        module.register_parameter(name, None)


def spec_of(module: Any) -> ExpertsSpec:
    """Return what an experts module computes. Raises ValueError."""
    name = type(module).__name__
    if module.has_post_expert_norm:
        raise ValueError(f"{name}: experts with a norm after each of them are not supported")
    probe = gates(32)
    expected = module._apply_gate(probe) if module.has_gate else module.act_fn(probe)
    for spec in _candidates(module):
        if is_same_gate(expected, activated(probe, spec)):
            break
    else:
        raise ValueError(f"{name}: its activation is not supported for experts")
    if not module.has_bias:
        return replace(spec, is_transposed=module.is_transposed)
    b13 = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
    biases = {"b13": b13.detach(), "b2": module.down_proj_bias.detach()}
    return replace(spec, is_transposed=module.is_transposed, **biases)


def _limit_of(module: Any) -> float | None:
    limit = getattr(module, "limit", getattr(module, "swiglu_limit", None))
    return limit if limit is not None and 0 < limit < math.inf else None


def _candidates(module: Any) -> Iterator[ExpertsSpec]:
    kinds: list[dict[str, Any]] = [{"activation": each} for each in ACTIVATIONS]
    kinds.append({"alpha": getattr(module, "alpha", getattr(module, "swiglu_alpha", 1.702))})
    forms: list[dict[str, Any]] = [{"is_gated": False}]
    if module.has_gate:
        layout = {"is_interleaved": not module.is_concatenated, "limit": _limit_of(module)}
        limits: list[dict[str, Any]] = [{}, {"limits_activated_gate": True}, {"limit": None}]
        forms = [{**layout, **a, "up_offset": b} for a, b in product(limits, (0.0, 1.0))]
    return (ExpertsSpec(**kind, **form) for kind, form in product(kinds, forms))


def _forward(module: Any, *inputs: torch.Tensor) -> torch.Tensor:
    x, ids, weights = inputs
    port = getattr(module, "port", None)
    if port is None:
        return type(module).forward.__wrapped__(module, x, ids, weights)  # type: ignore[no-any-return]
    w13, w2, spec = port
    bank = getattr(module, "tokenmesh_bank", None)
    return experts_with_lora(x, ids, weights, w13, w2, spec, bank)


ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
