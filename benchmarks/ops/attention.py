"""Work of paged attention, on pages scattered over the pool; SDPA gets its keys in one piece."""

import math
from typing import Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.ops.batch import Batch
from benchmarks.ops.work import Compute, Dimensions, Work, size_of
from tokenmesh.kernels.paged_attention import (
    TOLERANCE,
    DeviceRows,
    Rows,
    choose_splits,
    paged_attention,
    paged_attention_reference,
    prepare,
)

_PAGE_SIZE = 16
_BACKENDS: Final = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""The fastest on Hopper first; each takes what those before it refuse."""


def paged_attention_work(
    batch: Batch, sizes: Dimensions, dtype: torch.dtype, device: torch.device
) -> Work:
    """One layer's attention for a step."""
    query = torch.randn(batch.num_tokens, sizes.heads, sizes.head_dim, device=device).to(dtype)
    tables = _block_tables(batch)
    num_blocks = int(tables.max()) + 1
    pages = torch.randn(
        (2, num_blocks, sizes.kv_heads, _PAGE_SIZE, sizes.head_dim), device=device
    ).to(dtype)
    scale = sizes.head_dim**-0.5
    starts = [context - query_len for query_len, context in batch.sequences]
    rows = Rows(starts, [query_len for query_len, _ in batch.sequences], tables)
    on_device = Rows(rows.starts, rows.lengths, tables.to(device))
    if device.type == "cuda":
        ready = _device_rows(batch, sizes, tables, device)
        run: Compute = lambda: paged_attention(query, pages, ready, scale)  # noqa: E731
    else:
        prepared = prepare(rows, pages.shape, dtype, None)
        run = lambda: paged_attention(query, pages, prepared, scale)  # noqa: E731
    keys = sum(context for _, context in batch.sequences)
    kv_bytes = 2 * keys * sizes.kv_heads * sizes.head_dim * pages.element_size()
    return Work(
        run=run,
        reference=lambda: paged_attention_reference(query, pages, on_device, scale, None),
        torch_way=_sdpa(batch, query, pages, on_device.tables, scale),
        num_bytes=kv_bytes + 2 * size_of(query),
        num_flops=4 * sizes.heads * sizes.head_dim * _pairs(batch),
        tolerance=TOLERANCE[dtype],
    )


def _pairs(batch: Batch) -> int:
    """(query, key) pairs that causal attention computes."""
    return sum(new * context - new * (new - 1) // 2 for new, context in batch.sequences)


def _block_tables(batch: Batch) -> torch.Tensor:
    """[sequences, columns] int64: every block once in no order, 0 past a sequence's end."""
    counts = [-(-context // _PAGE_SIZE) for _, context in batch.sequences]
    columns = -(-max(counts) // _PAGE_SIZE) * _PAGE_SIZE
    order = torch.split(torch.randperm(sum(counts)) + 1, counts)
    tables = torch.zeros(len(counts), columns, dtype=torch.int64)
    for row, blocks in enumerate(order):
        tables[row, : len(blocks)] = blocks
    return tables


def _device_rows(
    batch: Batch, sizes: Dimensions, tables: torch.Tensor, device: torch.device
) -> DeviceRows:
    lengths = [new for new, _ in batch.sequences]
    num_short = sum(1 for new in lengths if new == 1)
    longest = max(context for _, context in batch.sequences)
    boundaries = torch.tensor([0, *lengths]).cumsum(0)
    return DeviceRows(
        cu_q=boundaries.to(device, torch.int32),
        seq_lens=torch.tensor([context for _, context in batch.sequences]).to(device, torch.int32),
        block_tables=tables.to(device, torch.int32),
        num_short=num_short,
        max_short_query=1,
        num_long_tokens=sum(new for new in lengths if new > 1),
        num_splits=choose_splits(num_short, sizes.kv_heads, longest),
    )


def _sdpa(
    batch: Batch, query: torch.Tensor, pages: torch.Tensor, tables: torch.Tensor, scale: float
) -> Compute:
    """One call a group; each group's keys are gathered beforehand, which is not timed."""
    calls = []
    token = row = 0
    for group in batch.groups:
        used = tables[row : row + group.count, : math.ceil(group.context / _PAGE_SIZE)]
        keys, values = (
            plane[used].transpose(1, 2).flatten(2, 3)[:, :, : group.context].contiguous()
            for plane in pages
        )
        size = group.count * group.query
        q = query[token : token + size].view(group.count, group.query, *query.shape[1:])
        calls.append((q.transpose(1, 2).contiguous(), keys, values, _mask(group.query, keys)))
        token += size
        row += group.count

    def run() -> torch.Tensor:
        outputs = []
        for q, keys, values, mask in calls:
            is_causal = mask is None and q.shape[2] > 1
            mixed = torch.nn.functional.scaled_dot_product_attention(
                q, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=True
            )
            outputs.append(mixed.transpose(1, 2).reshape(-1, q.shape[1] * q.shape[3]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def run_on_gpu() -> torch.Tensor:
        with sdpa_kernel(_BACKENDS, set_priority=True):
            return run()

    return run_on_gpu if query.is_cuda else run


def _mask(num_queries: int, keys: torch.Tensor) -> torch.Tensor | None:
    """[queries, keys]; None where SDPA's own causal mask, or none, is right."""
    num_keys = keys.shape[2]
    if num_queries in (1, num_keys):
        return None
    positions = torch.arange(num_keys - num_queries, num_keys, device=keys.device)
    return torch.arange(num_keys, device=keys.device) <= positions.unsqueeze(1)
