"""Adapters in the slots of a device: stacked matrices of each layer, a step's tokens by slot."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from tokenmesh.kernels.alignment import padded
from tokenmesh.kernels.lora.weights import LoraWeights

BLOCK_TOKENS: Final = 16
"""Most tokens of a tile."""


@dataclass(frozen=True, slots=True)
class DeviceBank:
    """The matrices of one layer for every slot, filled up with zeros to one rank."""

    a: torch.Tensor
    """[slots, parts * rank, I]"""
    b: torch.Tensor
    """[slots, O, rank]: an output belongs to one part."""
    parts: Sequence[tuple[int, int]]
    """First output and number of outputs of each part of a merged layer."""

    @classmethod
    def zeros(
        cls,
        num_slots: int,
        rank: int,
        inputs: int,
        parts: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "DeviceBank":
        """`rank`: a multiple of 16."""
        outputs = max((first + size for first, size in parts), default=0)
        shape = (num_slots, len(parts) * rank, padded(inputs))
        a = torch.zeros(shape, dtype=dtype, device=device)[..., :inputs]
        b = torch.zeros((num_slots, outputs, rank), dtype=dtype, device=device)
        return cls(a, b, tuple(parts))

    @property
    def rank(self) -> int:
        return self.b.shape[-1]

    def fill(self, slot: int, weights: LoraWeights, number: int) -> None:
        """Copy what an adapter does to the layer of bank `number`; zeros where it does nothing."""
        self.a[slot].zero_()
        self.b[slot].zero_()
        firsts = [first for first, _ in self.parts]
        for each in weights.parts.get(number, ()):
            rank, begin = each.a.shape[0], firsts.index(each.first) * self.rank
            self.a[slot, begin : begin + rank].copy_(each.a, non_blocking=True)
            rows = slice(each.first, each.first + each.b.shape[1])
            self.b[slot, rows, :rank].copy_(each.b.t(), non_blocking=True)


@dataclass(frozen=True, slots=True)
class DeviceAdapterRows:
    """The tokens of a step that have adapters, in tiles of one slot. T' tokens."""

    banks: Sequence[DeviceBank]
    tokens: torch.Tensor
    """int32 [T'], of the batch, tile by tile."""
    tiles: torch.Tensor
    """int32 [tiles, 3]: slot, first of `tokens`, number of tokens."""

    @staticmethod
    def tiles_of(slots: Sequence[tuple[int | None, int]]) -> tuple[list[int], list[int]]:
        """`tokens` and `tiles` as lists, from the slot and the number of tokens of each row."""
        by_slot: dict[int, list[int]] = {}
        first = 0
        for slot, count in slots:
            if slot is not None:
                by_slot.setdefault(slot, []).extend(range(first, first + count))
            first += count
        tokens: list[int] = []
        tiles: list[int] = []
        for slot, own in by_slot.items():
            for begin in range(0, len(own), BLOCK_TOKENS):
                tiles += (slot, len(tokens) + begin, min(BLOCK_TOKENS, len(own) - begin))
            tokens += own
        return tokens, tiles


def add_by_slot(
    x: torch.Tensor, out: torch.Tensor, bank: DeviceBank, rows: DeviceAdapterRows
) -> None:
    """Add to out [T, O], in place, what the adapters make of x [T, I]; tile by tile."""
    for slot, first, count in rows.tiles.tolist():
        tokens = rows.tokens[first : first + count].long()
        shrunk = x[tokens] @ bank.a[slot].t()
        for part, (begin, size) in enumerate(bank.parts):
            own = shrunk[:, part * bank.rank : (part + 1) * bank.rank]
            added = own @ bank.b[slot, begin : begin + size].t()
            out[tokens, begin : begin + size] += added.to(out.dtype)
