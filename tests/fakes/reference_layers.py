"""Attention layers on the kernels' specifications: a GPU's step on a CPU, without Triton."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from tokenmesh.engine.models.native import attention
from tokenmesh.kernels.paged_attention import (
    PLAIN,
    DeviceRows,
    Prepared,
    Rows,
    Variant,
    paged_attention,
    paged_attention_reference,
)
from tokenmesh.kernels.qk_norm_rope_kv_write import (
    qk_norm_rope_kv_write,
    qk_norm_rope_kv_write_reference,
)


def _attend(
    query: torch.Tensor,
    pages: torch.Tensor,
    rows: Prepared | DeviceRows,
    scale: float,
    variant: Variant = PLAIN,
) -> torch.Tensor:
    if isinstance(rows, Prepared):
        return paged_attention(query, pages, rows, scale, variant)
    lengths = rows.cu_q.diff()
    # the runner's promise about the order of a batch
    assert bool((lengths[: rows.num_short] == 1).all())
    assert int(lengths[rows.num_short :].sum()) == rows.num_long_tokens
    starts = (rows.seq_lens - lengths).tolist()
    specified = Rows(starts, lengths.tolist(), rows.block_tables.long())
    return paged_attention_reference(query, pages, specified, scale, rows.window, variant)


def _write(qkv: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, *more: Any) -> torch.Tensor:
    if slots.dim() == 2:
        return qk_norm_rope_kv_write(qkv, pages, slots, *more)
    where = [divmod(slot, pages.shape[3]) for slot in slots.tolist()]
    return qk_norm_rope_kv_write_reference(qkv, pages, where, *more)


@contextmanager
def reference_layers() -> Iterator[None]:
    """For every `DeviceStep`; the steps of a CPU stay as they are."""
    with (
        patch.object(attention, "paged_attention", _attend),
        patch.object(attention, "qk_norm_rope_kv_write", _write),
    ):
        yield
