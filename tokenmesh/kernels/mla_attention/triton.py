"""mla_attention on a GPU: one kernel for short and for long rows, and a merge where rows are split.

Sparse attention goes the same way, one token a tile, and is never split.
"""

from typing import Any, Final

import torch
import triton

from tokenmesh.kernels.alignment import assert_aligned_rows
from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.mla_attention.tile import latent_tile
from tokenmesh.kernels.mla_attention.triton_kernel import latent_kernel
from tokenmesh.kernels.paged_attention.device import MIN_SPLIT_KEYS, DeviceRows
from tokenmesh.kernels.paged_attention.triton_merge import merge_splits_kernel
from tokenmesh.kernels.paged_attention.triton_tiles import merge_tile

__all__ = ["mla_attention"]

LOG2_E: Final = 1.4426950408889634


def mla_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    rows: DeviceRows,
    rank: int,
    scale: float,
    indices: torch.Tensor | None,
    lse: torch.Tensor | None,
    page_scale: float = 1.0,
) -> torch.Tensor:
    """query [T, H, rank + rope_dim] -> [T, H * rank]; fills lse, if there is one."""
    assert_aligned_rows(query, rows.block_tables)
    assert pages.is_contiguous(), "pages lie one after the other"
    assert rows.window is None, "latents have no window"
    out = query.new_empty(*query.shape[:2], rank)
    if rows.num_short:
        _short(query, pages, rows, (scale, page_scale), indices, out, lse)
    if rows.num_short < len(rows.seq_lens):
        _long(query, pages, rows, (scale, page_scale), indices, out, lse)
    return out.flatten(1)


def _short(
    query: torch.Tensor,
    pages: torch.Tensor,
    rows: DeviceRows,
    scales: tuple[float, float],
    indices: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """A tile has heads of one token; parts of its keys are merged."""
    _, heads, rank = out.shape
    splits = rows.num_splits if indices is None else 1
    most = rows.num_short * rows.max_short_query
    tile = latent_tile(heads, rank, query.dtype)
    parts, part_lse = out, lse
    if splits > 1:
        parts = out.new_empty((most, splits, heads, rank), dtype=torch.float32)
        part_lse = out.new_empty((most, splits, heads), dtype=torch.float32)
    latent_kernel[(most, triton.cdiv(heads, tile["M"]), splits)](
        *_arguments(query, pages, rows, scales, indices, parts, part_lse),
        0,
        rows.num_short,
        **_constants(query, pages, rank, indices, lse),
        TOKENS=1,
        MAX_QUERY=rows.max_short_query,
        ENDS=False,
        SPLIT=splits > 1,
        **tile,
        **FUSED,
    )
    if splits > 1:
        merge_splits_kernel[(most, heads)](
            parts,
            part_lse,
            out,
            out if lse is None else lse,
            rows.cu_q,
            rows.seq_lens,
            splits,
            HEADS=heads,
            MAX_QUERY=rows.max_short_query,
            N=tile["N"],
            D=rank,
            P=rank,
            WINDOW=0,
            LSE=lse is not None,
            MIN_KEYS=MIN_SPLIT_KEYS,
            **merge_tile(splits, 1),
            **FUSED,
        )


def _long(
    query: torch.Tensor,
    pages: torch.Tensor,
    rows: DeviceRows,
    scales: tuple[float, float],
    indices: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """A tile has tokens with all their heads, or heads of one token."""
    _, heads, rank = out.shape
    num_long = len(rows.seq_lens) - rows.num_short
    tile = latent_tile(heads if indices is not None else 64, rank, query.dtype)
    heads_of_tile = tile["M"]
    if indices is None:
        heads_of_tile = min(tile["M"], triton.next_power_of_2(heads))
    tokens = tile["M"] // heads_of_tile
    grid = (rows.num_long_tokens // tokens + num_long, triton.cdiv(heads, heads_of_tile), 1)
    latent_kernel[grid](
        *_arguments(query, pages, rows, scales, indices, out, lse),
        rows.num_short,
        num_long,
        **_constants(query, pages, rank, indices, lse),
        TOKENS=tokens,
        MAX_QUERY=0,
        ENDS=rows.ends is not None,
        SPLIT=False,
        **tile,
        **FUSED,
    )


def _arguments(
    query: torch.Tensor,
    pages: torch.Tensor,
    rows: DeviceRows,
    scales: tuple[float, float],
    indices: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> tuple[Any, ...]:
    """Arguments in the kernel's order; an absent one is a tensor that the kernel does not read.

    scales: of logits, and of stored latents.
    """
    scale, page_scale = scales
    return (
        query,
        pages,
        out,
        out if lse is None else lse,
        rows.cu_q,
        rows.seq_lens,
        rows.block_tables,
        rows.cu_q if rows.ends is None else rows.ends,
        rows.cu_q if indices is None else indices,
        scale * page_scale * LOG2_E,
        page_scale,
        query.stride(0),
        query.stride(1),
        rows.block_tables.stride(0),
        0 if indices is None else indices.stride(0),
        0 if indices is None else indices.shape[1],
    )


def _constants(
    query: torch.Tensor,
    pages: torch.Tensor,
    rank: int,
    indices: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> dict[str, Any]:
    return {
        "HEADS": query.shape[1],
        "R": rank,
        "E": query.shape[2] - rank,
        "PAGE": pages.shape[1],
        "INDEXED": indices is not None,
        "LSE": lse is not None,
        "MIN_KEYS": MIN_SPLIT_KEYS,
    }
