"""Paged attention on the CPU with a variant or an lse: as `cpu`, with the softmax written out."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tokenmesh.kernels.page_codes import decode, is_coded, stored
from tokenmesh.kernels.paged_attention.gather import gather
from tokenmesh.kernels.paged_attention.variant import Variant
from tokenmesh.kernels.paged_attention.work import (
    SCRATCH_BYTES,
    DecodeGroup,
    PrefillTile,
    Prepared,
)


def paged_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    prepared: Prepared,
    scale: float,
    variant: Variant,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """query [T, H, D] -> [T, H * value_dim]; fills lse, float32 [T, H], if there is one."""
    call = _Call(pages, scale, variant, query.shape[2], variant.value_dim or query.shape[2])
    out = query.new_empty(query.shape[0], query.shape[1] * call.value_dim)
    for group in prepared.decode:
        out[group.tokens], log_sums = call.decode(query[group.tokens], group)
        if lse is not None:
            lse[group.tokens] = log_sums
    # SDPA of unlike widths would keep the scores of all heads and queries
    is_plain = variant.softcap is None and variant.sinks is None and lse is None
    is_plain &= call.key_dim == call.value_dim
    for tile in prepared.prefill:
        if is_plain:
            out[tile.tokens] = call.prefill_plain(query[tile.tokens], tile)
            continue
        for part, mixed, log_sums in call.prefill(query[tile.tokens], tile):
            tokens = slice(tile.tokens.start + part.start, tile.tokens.start + part.stop)
            out[tokens] = mixed
            if lse is not None:
                lse[tokens] = log_sums
    return out


@dataclass(frozen=True, slots=True)
class _Call:
    """One layer's pages and constants."""

    pages: torch.Tensor
    scale: float
    variant: Variant
    key_dim: int
    value_dim: int

    def decode(self, query: torch.Tensor, group: DecodeGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """query [n, H, D] -> [n, H * value_dim] and the lse [n, H]."""
        num_rows, heads, key_dim = query.shape
        dtype = group.mask.dtype
        gather(self.pages, group)
        keys, values = group.keys[:, :key_dim], group.values[..., : self.value_dim]
        by_kv_head = query.to(dtype).reshape(len(keys), -1, key_dim)
        sinks = self.variant.sinks
        if sinks is not None:
            sinks = sinks.expand(num_rows, heads).reshape(len(keys), -1)
        mixed, lse = self._attend(by_kv_head, keys, values, group.mask, sinks)
        return mixed.reshape(num_rows, -1), lse.view(num_rows, heads)

    def prefill_plain(self, query: torch.Tensor, tile: PrefillTile) -> torch.Tensor:
        """query [n, H, D] -> [n, H * value_dim], without softcap and sinks."""
        query = query.to(self._dtype(query))
        keys, values = self._gather(tile, query.dtype)
        by_kv_head = query.unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3)
        group = by_kv_head.shape[1]
        mixed = torch.nn.functional.scaled_dot_product_attention(
            by_kv_head,
            keys.unsqueeze(1).expand(-1, group, -1, -1),
            values.unsqueeze(1).expand(-1, group, -1, -1),
            attn_mask=tile.mask,
            is_causal=tile.is_causal,
            scale=self.scale * self.variant.k_scale,
        )
        return (mixed * self.variant.v_scale).permute(2, 0, 1, 3).flatten(1)

    def prefill(
        self, query: torch.Tensor, tile: PrefillTile
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """query [n, H, D] -> some of its tokens, their [*, H * value_dim] and lse [*, H], again and
        again: as many tokens at a time as scores fit the scratch size."""
        heads = query.shape[1]
        query = query.to(self._dtype(query))
        keys, values = self._gather(tile, query.dtype)
        size = max(1, SCRATCH_BYTES // (heads * tile.num_keys * torch.float32.itemsize))
        for start in range(0, len(query), size):
            part = slice(start, min(start + size, len(query)))
            # [kv_heads, tokens * group, D]: a mask goes by token, so tokens come before heads
            by_kv_head = query[part].unflatten(1, (len(keys), -1)).transpose(0, 1).flatten(1, 2)
            mask = _tile_mask(tile, part).repeat_interleave(heads // len(keys), 0)
            count = part.stop - part.start
            sinks = self.variant.sinks
            if sinks is not None:
                sinks = sinks.view(len(keys), -1).repeat(1, count)
            mixed, lse = self._attend(by_kv_head, keys.transpose(1, 2), values, mask, sinks)
            yield (
                part,
                mixed.view(len(keys), count, -1, self.value_dim).transpose(0, 1).flatten(1),
                lse.view(len(keys), count, -1).transpose(0, 1).flatten(1),
            )

    def _dtype(self, query: torch.Tensor) -> torch.dtype:
        """To compute a tile in: codes times their factors have more digits than a half."""
        return torch.float32 if self.pages.dtype == torch.int8 else query.dtype

    def _gather(self, tile: PrefillTile, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [kv_heads, num_keys, D] and values, widened where they have 8 bits."""
        planes, _, kv_heads, page_size, width = self.pages.shape
        pages = stored(self.pages).view(-1, page_size * width)
        gathered = pages.index_select(0, tile.gather).view(self.pages.dtype)
        both = gathered.view(planes, kv_heads, -1, width)[:, :, : tile.num_keys]
        if is_coded(self.pages.dtype):
            both = decode(both, dtype)
        return both[0, ..., : self.key_dim].to(dtype), both[-1, ..., : self.value_dim].to(dtype)

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query [B, M, D], keys [B, D, N], values [B, N, value_dim], mask of 0 and -inf over
        [B, M, N], sinks [B, M] -> the mixed values [B, M, value_dim] and the lse [B, M], both
        float32."""
        variant = self.variant
        scores = torch.bmm(query, keys).float().mul_(self.scale * variant.k_scale)
        if variant.softcap is not None:
            scores.div_(variant.softcap).tanh_().mul_(variant.softcap)
        lse = scores.add_(mask).logsumexp(-1)
        if sinks is not None:
            lse = lse.logaddexp(sinks.float())
        weights = scores.sub_(lse.unsqueeze(-1)).exp_().to(values.dtype)
        return torch.bmm(weights, values).float().mul_(variant.v_scale), lse


def _tile_mask(tile: PrefillTile, part: slice) -> torch.Tensor:
    """[queries of the part, num_keys] 0 and -inf."""
    if tile.mask is not None:
        hidden = ~tile.mask[part]
    elif tile.is_causal:
        hidden = torch.arange(tile.num_keys) > torch.arange(part.start, part.stop).unsqueeze(1)
    else:
        hidden = torch.zeros(part.stop - part.start, tile.num_keys, dtype=torch.bool)
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
