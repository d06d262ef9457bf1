"""The specification of linear, in float64."""

import torch


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [T, I], weight [O, I], bias [O] -> [T, O], rounded once to x's dtype."""
    out = x.double() @ weight.double().t()
    if bias is not None:
        out = out + bias.double()
    return out.to(x.dtype)
