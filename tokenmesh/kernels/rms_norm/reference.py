"""The specification of rms_norm, in float64."""

import torch


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., F], weight [F] -> [..., F], rounded once to x's dtype."""
    wide = x.double()
    variance = wide.pow(2).mean(-1, keepdim=True)
    return (wide / torch.sqrt(variance + eps) * weight.double()).to(x.dtype)


def add_rms_norm_reference(
    hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, alpha: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new hidden [T, F], rounded once, and the norm of what was rounded."""
    total = (hidden.double() + alpha * x.double()).to(hidden.dtype)
    return total, rms_norm_reference(total, weight, eps)
