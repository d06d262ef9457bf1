"""rope on the CPU as one complex multiplication over a view of x."""

import torch


def rotate(x: torch.Tensor, turns: torch.Tensor) -> None:
    """Rotate x [T, H, D] by turns [T, 1, P] complex64, in place. Strides of x must be even."""
    rotary = x[..., : 2 * turns.shape[-1]]
    pairs = (*rotary.shape[:-1], -1, 2)
    if x.dtype == torch.float32:
        torch.view_as_complex(rotary.view(pairs)).mul_(turns)
        return
    wide = torch.view_as_complex(rotary.float().view(pairs)).mul_(turns)
    rotary.copy_(torch.view_as_real(wide).flatten(-2))
