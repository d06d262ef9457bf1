"""DeviceThinking: reasoning budgets of the rows that have one. The twin of `ThinkingState`.

Only the device knows the previous token, so it also tracks where each output stands in reasoning.
Few rows have a budget and other batches launch none of this, so it uses torch's own kernels.
"""

from typing import Final

import torch

from tokenmesh.engine.plan import (
    MAX_MARKER_IDS,
    MAX_OTHER_ENDS,
    NewRow,
)
from tokenmesh.engine.sampling.device_tables import DeviceTables, Shape, Slots
from tokenmesh.engine.sampling.thinking import ThinkingTracker

_NUMBERS: Final = ("budget", "is_inside", "count", "num_end")
_WIDTH: Final = MAX_MARKER_IDS
_ANY: Final = -1
"""A place before a marker's first token."""
_NEVER: Final = -2
_UNKNOWN: Final = -3
_NUM_ENDS: Final = 1 + MAX_OTHER_ENDS


class DeviceThinking:
    """Rows without a budget take no slot; the last slot is unused."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._slots = Slots()
        self._slot = DeviceTables.zeros({"slot": Shape(max_num_seqs, 1, torch.int32)}, device)
        self._slot.flat.fill_(-1)
        self._tables = DeviceTables.zeros(_shapes(1), device)
        self._rows = 1
        self._longest = 1
        """Tokens of the longest end marker of any row so far."""

    def add(self, new: NewRow) -> None:
        """Take a row with what it has generated before."""
        budget = new.sampling.thinking
        if budget is None:
            return
        self._longest = max(self._longest, len(budget.end_ids))
        tracker = ThinkingTracker(budget, new.token_ids, new.num_prompt)
        slot = self._slots.allocate(new.row)
        if self._slots.capacity > self._rows:
            self._rows = self._slots.capacity
            self._tables = self._tables.resized(_shapes(self._rows))
        numbers = (budget.num_tokens, tracker.is_inside, tracker.count, len(budget.end_ids))
        for name, number in zip(_NUMBERS, numbers, strict=True):
            self._tables.stage_number(name, slot, number)
        end, start = budget.end_ids, budget.start_ids
        lists = {
            "end": end + [_ANY] * (_WIDTH - len(end)),
            "start_tail": _tail(start),
            "end_tails": [
                token
                for marker in [end, *budget.other_ends, *[[]] * MAX_OTHER_ENDS][:_NUM_ENDS]
                for token in _tail(marker)
            ],
            "recent": [_UNKNOWN] * (_WIDTH - len(tracker.recent)) + tracker.recent,
        }
        for name, values in lists.items():
            self._tables.stage(name, slot, torch.tensor(values, dtype=torch.int32))
        self._slot.stage_number("slot", new.row, slot)

    def remove(self, number: int) -> None:
        if self._slots.free(number):
            self._slot.stage_number("slot", number, -1)

    def apply(self) -> None:
        self._slot.apply()
        self._tables.apply()

    def __contains__(self, number: int) -> bool:
        return number in self._slots

    def force(
        self, logits: torch.Tensor, idx_mapping: torch.Tensor, is_sound: torch.Tensor
    ) -> None:
        """Leave rows that have spent their budget one token; float32 logits [N, V] in place.

        is_sound bool [N]: rows whose logits the model computed wrongly keep their flaw.
        """
        slots = self._slots_of(idx_mapping)
        end, recent = self._of("end", slots), self._of("recent", slots)
        num_end, known = self._of("num_end", slots), torch.zeros_like(slots)
        for width in range(1, self._longest):
            is_known = (recent[:, _WIDTH - width :] == end[:, :width]).all(1)
            # torch.where would wait for the device to read the number
            known = known.masked_fill(is_known & (width < num_end), width)
        token = end.gather(1, known.unsqueeze(1)).long().clamp(min=0)
        is_spent = self._of("count", slots) >= self._of("budget", slots)
        is_forced = (self._of("is_inside", slots) > 0) & is_spent & is_sound & (slots < self._rows)
        kept = logits.gather(1, token).masked_fill(is_forced.unsqueeze(1), 0.0)
        logits.masked_fill_(is_forced.unsqueeze(1), float("-inf"))
        logits.scatter_(1, token, kept)

    def record(self, tokens: torch.Tensor, idx_mapping: torch.Tensor) -> None:
        """The rows have drawn tokens, int64 [N]."""
        slots = self._slots_of(idx_mapping)
        recent = torch.cat([self._of("recent", slots)[:, 1:], tokens.int().unsqueeze(1)], 1)
        was_inside = self._of("is_inside", slots) > 0
        tails = self._of("end_tails", slots).view(-1, _NUM_ENDS, _WIDTH)
        ends = was_inside & _ends_with(recent.unsqueeze(1), tails).any(1)
        begins = ~was_inside & _ends_with(recent, self._of("start_tail", slots))
        count = self._of("count", slots) + (was_inside & ~ends)
        new = {"recent": recent, "count": count, "is_inside": (was_inside & ~ends) | begins}
        for name, values in new.items():
            table = self._tables.tables[name]
            table[slots] = values.to(table.dtype).view(len(slots), -1)

    def _slots_of(self, idx_mapping: torch.Tensor) -> torch.Tensor:
        """int64 [N]; the last slot for rows without a budget and for padding."""
        slots = self._slot.column("slot")[idx_mapping.clamp(min=0).long()].long()
        return slots.masked_fill((idx_mapping < 0) | (slots < 0), self._rows)

    def _of(self, name: str, slots: torch.Tensor) -> torch.Tensor:
        table = self._tables.tables[name][slots]
        return table.squeeze(1) if name in _NUMBERS else table


def _shapes(rows: int) -> dict[str, Shape]:
    numbers = {name: Shape(rows + 1, 1, torch.int32) for name in _NUMBERS}
    lists = {name: Shape(rows + 1, _WIDTH, torch.int32) for name in ("end", "start_tail", "recent")}
    return numbers | lists | {"end_tails": Shape(rows + 1, _NUM_ENDS * _WIDTH, torch.int32)}


def _tail(marker: list[int]) -> list[int]:
    """As wide as all; an empty marker is one that no tokens ever end with."""
    if not marker:
        return [_NEVER] * _WIDTH
    return [_ANY] * (_WIDTH - len(marker)) + marker


def _ends_with(recent: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    return ((recent == tail) | (tail == _ANY)).all(-1)
