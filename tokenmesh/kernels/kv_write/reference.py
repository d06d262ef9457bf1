"""The specification of kv_write: one assignment a token."""

from collections.abc import Sequence

import torch


def kv_write_reference(
    keys_values: torch.Tensor, pages: torch.Tensor, slots: Sequence[tuple[int, int]]
) -> None:
    """slots: (block, offset in the page) of each token."""
    kv_heads = pages.shape[2]
    for token, (block, offset) in enumerate(slots):
        pages[0, block, :, offset] = keys_values[token, :kv_heads]
        pages[1, block, :, offset] = keys_values[token, kv_heads:]
