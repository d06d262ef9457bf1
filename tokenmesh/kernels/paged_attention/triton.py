"""paged_attention on a GPU: short rows by the decode kernel, long rows by the prefill kernel.

A mixed step is both, one after the other, into one output. Where short rows are split a third
kernel merges the parts. No launch waits for the device, and no count of rows, tokens or splits is a
constant of a kernel, so that a served model soon stops compiling.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from tokenmesh.kernels.alignment import assert_aligned_rows
from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.paged_attention.device import MIN_SPLIT_KEYS, DeviceRows
from tokenmesh.kernels.paged_attention.triton_decode import decode_kernel
from tokenmesh.kernels.paged_attention.triton_merge import merge_splits_kernel
from tokenmesh.kernels.paged_attention.triton_prefill import prefill_kernel
from tokenmesh.kernels.paged_attention.triton_tiles import decode_tile, merge_tile, prefill_tile
from tokenmesh.kernels.paged_attention.variant import PLAIN, Variant

__all__ = ["paged_attention"]

LOG2_E = 1.4426950408889634


def paged_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    rows: DeviceRows,
    scale: float,
    variant: Variant = PLAIN,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [T, H, D] -> [T, H * value_dim]; fills lse, float32 [T, H], if there is one."""
    assert_aligned_rows(query, rows.block_tables)
    assert pages[0].is_contiguous(), "pages lie one after the other"
    assert pages.shape[3].bit_count() == 1, "tiles and pages divide each other"
    assert scale > 0, "the largest logit is found before it is scaled"
    out = query.new_empty(*query.shape[:2], variant.value_dim or query.shape[2])
    call = _Call(query, pages, rows, scale, variant, out, lse)
    if rows.num_short:
        call.decode()
    if rows.num_short < len(rows.seq_lens):
        call.prefill()
    return out.flatten(1)


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of one call, in the forms that the kernels take."""

    query: torch.Tensor
    pages: torch.Tensor
    rows: DeviceRows
    scale: float
    variant: Variant
    out: torch.Tensor
    lse: torch.Tensor | None

    def decode(self) -> None:
        """Short rows: one launch, and a merge when they are split."""
        rows, splits = self.rows, self.rows.num_splits
        kv_heads, group = self.pages.shape[2], self._group
        out, lse = self.out, self.lse
        if splits > 1:
            most = rows.num_short * rows.max_short_query
            shape = (most, splits, kv_heads * group)
            lse = out.new_empty(shape, dtype=torch.float32)
            out = out.new_empty((*shape, out.shape[2]), dtype=torch.float32)
        query_rows = rows.max_short_query * group
        tile = decode_tile(query_rows, self.pages.shape[4], self.query.dtype, self.pages.dtype)
        tiles = triton.cdiv(query_rows, tile["M"])
        decode_kernel[(rows.num_short * tiles, kv_heads, splits)](
            *self._tensors(out, lse),
            *self._numbers(),
            M_TILES=tiles,
            SPLIT=splits > 1,
            MIN_KEYS=MIN_SPLIT_KEYS,
            **self._constants(),
            **tile,
            **FUSED,
        )
        if splits > 1:
            assert lse is not None
            self._merge(out, lse, tile["N"])

    def _merge(self, parts: torch.Tensor, part_lse: torch.Tensor, keys_of_tile: int) -> None:
        rows, heads, head_dim = self.rows, self.query.shape[1], self.out.shape[2]
        merge_splits_kernel[(rows.num_short * rows.max_short_query, heads)](
            parts,
            part_lse,
            self.out,
            self.out if self.lse is None else self.lse,
            rows.cu_q,
            rows.seq_lens,
            rows.num_splits,
            HEADS=heads,
            MAX_QUERY=rows.max_short_query,
            N=keys_of_tile,
            D=head_dim,
            P=triton.next_power_of_2(head_dim),
            WINDOW=rows.window or 0,
            LSE=self.lse is not None,
            MIN_KEYS=MIN_SPLIT_KEYS,
            **merge_tile(rows.num_splits, self.pages.shape[2]),
            **FUSED,
        )

    def prefill(self) -> None:
        """Long rows: one launch over all their tiles."""
        rows = self.rows
        tile = prefill_tile(self._group, self.pages.shape[4], self.query.dtype)
        num_long = len(rows.seq_lens) - rows.num_short
        tiles = rows.num_long_tokens // (tile["M"] // self._group) + num_long
        prefill_kernel[(tiles, self.pages.shape[2])](
            *self._tensors(self.out, self.lse),
            self.query if rows.ends is None else rows.ends,
            *self._numbers(),
            rows.num_short,
            num_long,
            **self._constants(),
            ENDS=rows.ends is not None,
            SYMMETRIC=rows.has_symmetric_window and rows.window is not None,
            **tile,
            **FUSED,
        )

    @property
    def _group(self) -> int:
        return self.query.shape[1] // self.pages.shape[2]

    def _tensors(self, out: torch.Tensor, lse: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Arguments in the kernels' order; an absent one is a tensor that is never read."""
        rows, sinks = self.rows, self.variant.sinks
        return (
            self.query,
            self.pages[0],
            self.pages[1],
            out,
            out if lse is None else lse,
            rows.cu_q,
            rows.seq_lens,
            rows.block_tables,
            self.query if sinks is None else sinks,
        )

    def _numbers(self) -> tuple[float, ...]:
        """scale, cap, v_scale and the strides; see `attend` for the first two."""
        variant, query = self.variant, self.query
        scale = self.scale * variant.k_scale
        if variant.softcap is None:
            scale, cap = scale * LOG2_E, 0.0
        else:
            scale, cap = scale / variant.softcap, variant.softcap * LOG2_E
        strides = (query.stride(0), query.stride(1), self.rows.block_tables.stride(0))
        return (scale, cap, variant.v_scale, *strides)

    def _constants(self) -> dict[str, Any]:
        key_dim, value_dim = self.query.shape[2], self.out.shape[2]
        return {
            "GROUP": self._group,
            "KV_HEADS": self.pages.shape[2],
            "W": self.pages.shape[4],
            "D": key_dim,
            "P": triton.next_power_of_2(key_dim),
            "DV": value_dim,
            "PV": triton.next_power_of_2(value_dim),
            "PAGE": self.pages.shape[3],
            "WINDOW": self.rows.window or 0,
            "SOFTCAP": self.variant.softcap is not None,
            "SINKS": self.variant.sinks is not None,
            "LSE": self.lse is not None,
        }
