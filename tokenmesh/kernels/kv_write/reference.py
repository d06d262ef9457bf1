"""The specification of kv_write: one assignment a token."""

from collections.abc import Sequence

import torch


def kv_write_reference(
    keys_values: torch.Tensor,
    pages: torch.Tensor,
    slots: Sequence[tuple[int, int]],
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """slots: (block, offset in the page) of each token."""
    kv_heads = pages.shape[2]
    for token, (block, offset) in enumerate(slots):
        pages[0, block, :, offset] = _stored(keys_values[token, :kv_heads] / k_scale, pages.dtype)
        pages[1, block, :, offset] = _stored(keys_values[token, kv_heads:] / v_scale, pages.dtype)


def _stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """8-bit formats saturate; the others overflow to infinity as torch does."""
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        return x.double().clamp(-limit, limit).to(dtype)
    return x.to(dtype)
