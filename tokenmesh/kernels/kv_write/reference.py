"""The specification of kv_write: one assignment a token."""

from collections.abc import Sequence

import torch

from tokenmesh.kernels.page_codes import encode


def kv_write_reference(
    keys_values: torch.Tensor,
    pages: torch.Tensor,
    slots: Sequence[tuple[int, int]],
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """slots: (block, offset in the page) of each token. 8-bit formats saturate; the others overflow
    to infinity as torch does."""
    kv_heads = pages.shape[2]
    for token, (block, offset) in enumerate(slots):
        keys, values = keys_values[token, :kv_heads], keys_values[token, kv_heads:]
        pages[0, block, :, offset] = encode(keys, pages.dtype, k_scale)
        pages[1, block, :, offset] = encode(values, pages.dtype, v_scale)
