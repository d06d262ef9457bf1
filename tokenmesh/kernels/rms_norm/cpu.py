"""rms_norm on the CPU: torch's own, which keeps its sums in float32."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., F]; weight [F], or [N, F] with a row for each of x's [..., N, F]."""
    features = x.shape[-1:]
    if weight.dim() == 1:
        return torch.nn.functional.rms_norm(x, features, weight, eps)
    return torch.nn.functional.rms_norm(x, features, None, eps).mul_(weight)
