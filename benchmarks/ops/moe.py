"""Work of moe: the experts of a layer whose tokens choose them at random."""

from typing import Final

import torch

from benchmarks.ops.batch import Batch
from benchmarks.ops.linear import has_native
from benchmarks.ops.work import Dimensions, Work, size_of
from tokenmesh.kernels.linear.formats.round import Rounding, rounded
from tokenmesh.kernels.moe import (
    TOLERANCE,
    ExpertCodes,
    ExpertsSpec,
    experts,
    experts_reference,
    pack,
)

_EXPERTS: Final = 32
_TOP_K: Final = 4
"""Each as wide as a fourth of the model's MLP: a token has as many weights as in the model."""


def moe_work(batch: Batch, sizes: Dimensions, dtype: torch.dtype, device: torch.device) -> Work:
    """x [tokens, hidden] by 4 of 32 experts each."""
    return experts_work(batch, sizes, dtype, device, None)


def experts_work(
    batch: Batch,
    sizes: Dimensions,
    dtype: torch.dtype,
    device: torch.device,
    rounding: Rounding | None,
) -> Work:
    """rounding: what the weights are rounded to, in which they stay; None: they are plain."""
    hidden, tokens = sizes.hidden, batch.num_tokens
    inner = -(-sizes.intermediate // (32 * _TOP_K)) * 32  # groups of codes, and what kernels take
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    w13 = torch.randn(_EXPERTS, 2 * inner, hidden, device=device).mul_(hidden**-0.5).to(dtype)
    w2 = torch.randn(_EXPERTS, hidden, inner, device=device).mul_(inner**-0.5).to(dtype)
    scores = torch.rand(tokens, _EXPERTS, device=device)
    weights, ids = scores.topk(_TOP_K)
    spec = ExpertsSpec()
    codes: tuple[ExpertCodes | None, ExpertCodes | None] = None, None
    num_hit = len(torch.unique(ids))
    expert_bytes = size_of(w13[0], w2[0])
    if rounding is not None:
        codes = _rounded(w13, 2, rounding), _rounded(w2, 1, rounding)
        # half a byte of INT4 and its part of a scale, in place of a number
        expert_bytes = (w13[0].numel() + w2[0].numel()) * 5 // 8
    packed = pack(w13, w2, spec, has_native(device), codes)
    return Work(
        run=lambda: experts(x, ids, weights, *packed),
        reference=lambda: experts_reference(x, ids, weights, w13, w2, spec),
        torch_way=lambda: _by_expert(x, ids, weights, w13, w2),
        num_bytes=num_hit * expert_bytes + 2 * size_of(x),
        num_flops=6 * ids.numel() * hidden * inner,
        # the C kernels round activations to 8 bits
        tolerance=(2 if rounding is None else 4) * TOLERANCE[dtype],
    )


def _rounded(stack: torch.Tensor, slices: int, to: Rounding) -> ExpertCodes:
    """The codes of each expert, whose weights become what they stand for."""
    made = [[rounded(each.contiguous(), to) for each in own.chunk(slices)] for own in stack]
    for own, codes in zip(stack, made, strict=True):
        own.copy_(torch.cat([each.decoded() for each in codes]))
    return lambda expert: made[expert]


def _by_expert(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros_like(x)
    for expert in torch.unique(ids).tolist():
        token, place = torch.where(ids == expert)
        gate, up = torch.nn.functional.linear(x[token], w13[expert]).chunk(2, dim=-1)
        part = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, w2[expert])
        out.index_add_(0, token, (part * weights[token, place, None]).to(x.dtype))
    return out
