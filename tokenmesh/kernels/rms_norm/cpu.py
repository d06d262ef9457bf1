"""rms_norm on the CPU from the fewest passes that torch offers; sums and products in float32."""

from functools import lru_cache

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., F]; weight float32 [F], or [N, F] with a row for each of x's [..., N, F]."""
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(_scalar(eps), length, length, value=1 / x.shape[-1]).rsqrt_()
    if wide is x:
        return (x * scale).mul_(weight)
    return wide.mul_(scale).mul_(weight).to(x.dtype)


@lru_cache(maxsize=8)
def _scalar(value: float) -> torch.Tensor:
    """addcmul wants a tensor; making one costs as much as the addition."""
    return torch.tensor(value)
