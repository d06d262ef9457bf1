"""DevicePenalties: penalties, prompt masks and output counts of the rows that have any."""

from collections import Counter

import torch

from tokenmesh.engine.plan import NewRow
from tokenmesh.engine.sampling.device_tables import (
    DeviceTables,
    Shape,
    Slots,
    mask_words,
    num_mask_words,
)
from tokenmesh.engine.sampling.penalties import has_penalty
from tokenmesh.kernels.penalties import PenaltyRows

_PARAMETERS = ("repetition", "presence", "frequency")


class DevicePenalties:
    """Rows without penalties take no slot: counts are as wide as the vocabulary."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._slots = Slots()
        self._slot = DeviceTables.zeros({"slot": Shape(max_num_seqs, 1, torch.int32)}, device)
        self._slot.flat.fill_(-1)
        self._tables = DeviceTables.zeros(self._shapes(1), device)
        self.rows = self._rows()

    def add(self, new: NewRow) -> None:
        """Take a row with what it has generated before."""
        params = new.sampling
        if not has_penalty(params):
            return
        slot = self._slots.allocate(new.row)
        if self._slots.capacity > len(self.rows.counts):
            self._tables = self._tables.resized(self._shapes(self._slots.capacity))
            self.rows = self._rows()
        self._slot.stage_number("slot", new.row, slot)
        self._tables.stage_number("repetition", slot, params.repetition_penalty)
        self._tables.stage_number("presence", slot, params.presence_penalty)
        self._tables.stage_number("frequency", slot, params.frequency_penalty)
        prompt = torch.tensor(new.token_ids[: new.num_prompt], dtype=torch.int64)
        mask = mask_words(prompt[prompt < self._vocab_size], self._vocab_size)
        self._tables.stage("prompt", slot, mask)
        self._stage_counts(slot, new.token_ids[new.num_prompt :])

    def remove(self, number: int) -> None:
        if self._slots.free(number):
            self._slot.stage_number("slot", number, -1)

    def apply(self) -> None:
        self._slot.apply()
        self._tables.apply()

    def __contains__(self, number: int) -> bool:
        return number in self._slots

    def _stage_counts(self, slot: int, output: list[int]) -> None:
        """Stage the counts of a resumed request; a new request's row is zeroed on the device."""
        if not output:
            # counts of an earlier request that were staged and never sent are obsolete
            self._tables.discard("counts", slot)
            self.rows.counts[slot].zero_()
            return
        counts = Counter(token for token in output if token < self._vocab_size)
        row = torch.zeros(self._vocab_size, dtype=torch.int32)
        row[list(counts)] = torch.tensor(list(counts.values()), dtype=torch.int32)
        self._tables.stage("counts", slot, row)

    def _shapes(self, capacity: int) -> dict[str, Shape]:
        parameters = {name: Shape(capacity, 1, torch.float32) for name in _PARAMETERS}
        return parameters | {
            "prompt": Shape(capacity, num_mask_words(self._vocab_size), torch.int32),
            "counts": Shape(capacity, self._vocab_size, torch.int32),
        }

    def _rows(self) -> PenaltyRows:
        parameters = {name: self._tables.column(name) for name in _PARAMETERS}
        tables = {name: self._tables.tables[name] for name in ("prompt", "counts")}
        return PenaltyRows(slot=self._slot.column("slot"), **parameters, **tables)
