"""The specification of rope: a rotation matrix a pair, in float64."""

import torch


def rope_reference(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """x [T, H, D], turns [T, 1, P] complex -> [T, H, D], a new tensor."""
    rotary = 2 * turns.shape[-1]
    even = x[..., 0:rotary:2].double()
    odd = x[..., 1:rotary:2].double()
    cos, sin = turns.real.double(), turns.imag.double()
    out = x.clone()
    out[..., 0:rotary:2] = (even * cos - odd * sin).to(x.dtype)
    out[..., 1:rotary:2] = (odd * cos + even * sin).to(x.dtype)
    return out


def interleave_rows(weight: torch.Tensor, head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Reorder rows so that halves (i, i + rotary_dim / 2) become pairs (2i, 2i + 1).

    weight [heads * head_dim, ...]: a projection, its bias, or a norm's weight.
    """
    heads = weight.shape[0] // head_dim
    by_head = weight.reshape(heads, head_dim, *weight.shape[1:])
    halves = by_head[:, :rotary_dim].reshape(heads, 2, rotary_dim // 2, *weight.shape[1:])
    pairs = halves.transpose(1, 2).reshape(heads, rotary_dim, *weight.shape[1:])
    return torch.cat([pairs, by_head[:, rotary_dim:]], dim=1).reshape(weight.shape)
