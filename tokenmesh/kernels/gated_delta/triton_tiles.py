"""Sizes of the tiles of gated_delta's kernels, and how exact their products are."""

from typing import Any, Final

import torch
import triton

from tokenmesh.kernels.gated_delta.cpu import CHUNK

FEW: Final = 8
"""Rows of up to this many tokens go token by token: 1, or 1 + drafts."""
RECURRENT_LAUNCH: Final = {"num_warps": 8, "num_stages": 2}
SOLVE_LAUNCH: Final = {"num_warps": 8, "num_stages": 1}
SCAN_LAUNCH: Final = {"num_warps": 8, "num_stages": 1}


def block_k(key_dim: int) -> int:
    """At least 16, which a product of tiles needs."""
    return max(16, int(triton.next_power_of_2(key_dim)))


def recurrent_block_v(value_dim: int) -> int:
    """Columns of a state that a program keeps, each with all of its rows."""
    return min(32, block_k(value_dim))


def scan_block_v(value_dim: int, has_channels: bool) -> int:
    """Like `recurrent_block_v`, but a chunk's keys and queries need registers too."""
    return min(32 if has_channels else 64, block_k(value_dim))


def solve_constants(dtype: torch.dtype) -> dict[str, Any]:
    """For activations of this dtype. The operands of products are rounded to it, but not those of
    an inverse, through which the changes of a chunk depend on each other."""
    return {
        "CHUNK": CHUNK,
        "LEVELS": CHUNK.bit_length() - 1,
        "EXACT": "ieee" if dtype == torch.float32 else "tf32x3",
    }
