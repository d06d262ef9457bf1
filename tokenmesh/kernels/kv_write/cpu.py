"""kv_write on the CPU: one scatter over the pool seen as rows."""

import torch

from tokenmesh.kernels.page_codes import encode, is_coded, stored


def slot_rows(blocks: torch.Tensor, offsets: torch.Tensor, pages_shape: torch.Size) -> torch.Tensor:
    """blocks, offsets [T] int64 -> [T, 2 * kv_heads] row numbers for `kv_write`."""
    _, num_blocks, kv_heads, page_size, _ = pages_shape
    first = (blocks * kv_heads * page_size + offsets).unsqueeze(1)
    heads = torch.arange(2 * kv_heads)
    plane = heads // kv_heads * (num_blocks * kv_heads * page_size)
    return first + (plane + heads % kv_heads * page_size)


def kv_write(
    keys_values: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Scatter keys_values [T, 2 * kv_heads, D] to the rows that `slot_rows` named."""
    rows = keys_values
    if is_coded(pages.dtype):
        kv_heads = pages.shape[2]
        scaled = ((keys_values[:, :kv_heads], k_scale), (keys_values[:, kv_heads:], v_scale))
        rows = torch.cat([stored(encode(x, pages.dtype, scale)) for x, scale in scaled], dim=1)
    stored(pages).view(-1, pages.shape[-1]).index_put_((slots,), rows)
