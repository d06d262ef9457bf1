"""The tile of mla_attention's kernel."""

import torch
import triton


def latent_tile(heads: int, rank: int, query: torch.dtype) -> dict[str, int]:
    """M query rows of a tile for so many heads, and N keys."""
    most = 32 if query.itemsize == 2 else 16
    rows = max(16, min(most, triton.next_power_of_2(heads)))
    return {
        "M": rows,
        "N": 32,
        # 64 rows of 512 results, for products of warp groups, would spill registers
        "num_warps": 8 if rows * rank > 8 << 10 else 4,
        "num_stages": 2,
    }
