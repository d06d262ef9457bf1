"""Work of moe: the experts of a layer whose tokens choose them at random."""

from typing import Final

import torch

from benchmarks.ops.batch import Batch
from benchmarks.ops.linear import has_native
from benchmarks.ops.work import Dimensions, Work, size_of
from tokenmesh.kernels.moe import TOLERANCE, ExpertsSpec, experts, experts_reference, pack

_EXPERTS: Final = 32
_TOP_K: Final = 4
"""Each as wide as a fourth of the model's MLP: a token has as many weights as in the model."""


def moe_work(batch: Batch, sizes: Dimensions, dtype: torch.dtype, device: torch.device) -> Work:
    """x [tokens, hidden] by 4 of 32 experts each."""
    hidden, tokens = sizes.hidden, batch.num_tokens
    inner = -(-sizes.intermediate // (16 * _TOP_K)) * 16  # kernels take multiples of 16
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    w13 = torch.randn(_EXPERTS, 2 * inner, hidden, device=device).mul_(hidden**-0.5).to(dtype)
    w2 = torch.randn(_EXPERTS, hidden, inner, device=device).mul_(inner**-0.5).to(dtype)
    scores = torch.rand(tokens, _EXPERTS, device=device)
    weights, ids = scores.topk(_TOP_K)
    spec = ExpertsSpec()
    packed = pack(w13, w2, spec, native=has_native(device))
    num_hit = len(torch.unique(ids))
    return Work(
        run=lambda: experts(x, ids, weights, *packed),
        reference=lambda: experts_reference(x, ids, weights, w13, w2, spec),
        torch_way=lambda: _by_expert(x, ids, weights, w13, w2),
        num_bytes=num_hit * size_of(w13[0], w2[0]) + 2 * size_of(x),
        num_flops=6 * ids.numel() * hidden * inner,
        tolerance=2 * TOLERANCE[dtype],
    )


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
