"""rms_norm on the CPU: in C where the C kernels have been started, else from the fewest passes that
torch offers. Sums and products are in float32."""

from functools import lru_cache

import torch

from tokenmesh.kernels.native import has_started, native_norm
from tokenmesh.kernels.native.elementwise import fits


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., F]; weight float32 [F], or [N, F] with a row for each of x's [..., N, F]."""
    if has_started() and fits(x, weight):
        return native_norm(x, weight, eps)
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
