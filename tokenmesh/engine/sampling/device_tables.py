"""DeviceTables: rows of parameters on a device, written in batches.

`stage` keeps writes on the host; `apply` sends all of them in one copy and one launch. A shorter
entry leaves the end of the previous one in place, so every ragged table has counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import torch

from tokenmesh.engine.layers.upload import upload
from tokenmesh.kernels.staged_writes import staged_writes

_ALIGNMENT = 16
"""Tables begin at multiples of so many int32."""


@dataclass(frozen=True, slots=True)
class Shape:
    rows: int
    width: int
    dtype: torch.dtype

    @property
    def words(self) -> int:
        """int32 words, rounded up."""
        words = self.rows * self.width * self.dtype.itemsize // 4
        return -(-words // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class DeviceTables:
    """Tables by name, all of them views of one buffer."""

    shapes: Mapping[str, Shape]
    flat: torch.Tensor
    """int32, all of it"""
    tables: Mapping[str, torch.Tensor]
    """[rows, width]"""
    staged: dict[int, torch.Tensor] = field(default_factory=dict)
    """Values, int32, by their place in `flat`; a later write of a row replaces the earlier."""

    @classmethod
    def zeros(cls, shapes: Mapping[str, Shape], device: torch.device) -> Self:
        flat = torch.zeros(
            sum(shape.words for shape in shapes.values()), dtype=torch.int32, device=device
        )
        tables, start = {}, 0
        for name, shape in shapes.items():
            part = flat[start : start + shape.words].view(shape.dtype)
            tables[name] = part[: shape.rows * shape.width].view(shape.rows, shape.width)
            start += shape.words
        return cls(shapes, flat, tables)

    def column(self, name: str) -> torch.Tensor:
        """A table of width 1 as [rows]."""
        return self.tables[name].squeeze(1)

    def stage(self, name: str, row: int, values: torch.Tensor) -> None:
        """Write the first entries of a row; values are on the host and of the table's dtype."""
        table = self.tables[name]
        assert values.dtype == table.dtype
        assert len(values) <= table.shape[1]
        self.staged[self._place(name, row)] = values.contiguous().view(torch.int32)

    def stage_number(self, name: str, row: int, value: float) -> None:
        """Write the first entry of a row."""
        self.stage(name, row, torch.tensor([value], dtype=self.shapes[name].dtype))

    def discard(self, name: str, row: int) -> None:
        """Forget what was staged for a row."""
        self.staged.pop(self._place(name, row), None)

    def _place(self, name: str, row: int) -> int:
        table = self.tables[name]
        return int(table.storage_offset() + row * table.shape[1]) * (table.dtype.itemsize // 4)

    def apply(self) -> None:
        """Send what was staged; the device's later work sees it. Waits for nothing."""
        if not self.staged:
            return
        values = list(self.staged.values())
        lengths = torch.tensor([0, *map(len, values)], dtype=torch.int32)
        places = torch.tensor(list(self.staged), dtype=torch.int64)
        packed = torch.cat(
            [places.view(torch.int32), lengths.cumsum(0, dtype=torch.int32), *values]
        )
        packed = upload(packed, self.flat.device)
        count = len(places)
        places = packed[: 2 * count].view(torch.int64)
        starts, data = packed[2 * count : 3 * count + 1], packed[3 * count + 1 :]
        staged_writes(self.flat, places, starts, data)
        self.staged.clear()

    def resized(self, shapes: Mapping[str, Shape]) -> Self:
        """Tables at least as large with the same contents; what is staged is applied first."""
        self.apply()
        larger = self.zeros(shapes, self.flat.device)
        for name, table in self.tables.items():
            rows, width = table.shape
            larger.tables[name][:rows, :width] = table
        return larger


def mask_words(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Token ids, int64, below vocab_size -> int32 words; bit i % 32 of word i // 32 is token i."""
    bits = torch.zeros(num_mask_words(vocab_size) * 32, dtype=torch.int64)
    bits[token_ids] = 1
    words = (bits.view(-1, 32) << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def num_mask_words(vocab_size: int) -> int:
    """Words of a mask with a bit for each token."""
    return -(-vocab_size // 32)


class Slots:
    """Slots of the few rows that need a feature, so that the others take no memory."""

    def __init__(self) -> None:
        self._slot_by_number: dict[int, int] = {}
        self._free: list[int] = []
        self.capacity = 0

    def __len__(self) -> int:
        return len(self._slot_by_number)

    def __contains__(self, number: int) -> bool:
        return number in self._slot_by_number

    def allocate(self, number: int) -> int:
        """A free slot. If it lies beyond the tables, `capacity` has doubled."""
        if not self._free:
            larger = max(1, 2 * self.capacity)
            self._free = list(reversed(range(self.capacity, larger)))
            self.capacity = larger
        slot = self._slot_by_number[number] = self._free.pop()
        return slot

    def free(self, number: int) -> bool:
        """Give a row's slot back; False when it had none."""
        slot = self._slot_by_number.pop(number, None)
        if slot is not None:
            self._free.append(slot)
        return slot is not None
