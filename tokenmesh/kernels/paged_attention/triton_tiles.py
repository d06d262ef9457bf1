"""Tile sizes, warps and stages, chosen by what the compiler makes of them (docs/log.md).

They depend on shapes of the model and on the form of a launch, never on how full it is. M counts
query rows, N keys. Tables that are read before keys take a stage of the pipeline: 3 stages are one
tile of keys and values in flight next to the one in use, 5 are two.
"""

import torch
import triton

from tokenmesh.kernels.paged_attention.device import TARGET_PROGRAMS


def decode_tile(
    query_rows: int, head_dim: int, query: torch.dtype, pages: torch.dtype
) -> dict[str, int]:
    """query_rows: tokens of a row times query heads of a kv head."""
    row_bytes = triton.next_power_of_2(head_dim) * query.itemsize
    rows = min(triton.next_power_of_2(query_rows), 64, (32 << 10) // row_bytes)
    # Widening keys of 8 bits takes the registers of the programs that would hide the latency.
    stages = 5 if pages.itemsize == 1 else 3
    return {
        "M": max(rows, 16),
        "N": min(64, (16 << 10) // row_bytes),
        "num_warps": 4,
        "num_stages": stages,
    }


def prefill_tile(group: int, head_dim: int, query: torch.dtype) -> dict[str, int]:
    """group: query heads of a kv head; all of them are in one tile."""
    row_bytes = triton.next_power_of_2(head_dim) * query.itemsize
    # No other program runs on the multiprocessor to hide a copy's latency: two tiles in flight.
    rows, keys, stages = 128, 64 if row_bytes <= 256 else 32, 5
    if row_bytes > 512:
        # 128 rows of 512 features are more than a multiprocessor has shared memory or registers for
        rows, stages = 64, 3
    if query == torch.float32:
        # three products for one: for tests and small models, where it need not be fast
        rows, stages = 64 if row_bytes <= 512 else 32, 2
    return {
        "M": max(rows, triton.next_power_of_2(group)),
        "N": keys,
        "num_warps": 8,
        "num_stages": stages,
    }


def merge_tile(splits: int, kv_heads: int) -> dict[str, int]:
    """A program reads the logs of all splits at once and their parts in blocks.

    There is room for the most that `choose_splits` has for a model of so many kv heads.
    """
    padded = triton.next_power_of_2(max(splits, triton.cdiv(TARGET_PROGRAMS, kv_heads)))
    return {"PADDED_SPLITS": padded, "BLOCK": min(16, padded), "num_warps": 4}
