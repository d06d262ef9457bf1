"""DeviceLimits: allowed tokens, biases, min_tokens and bad words of the rows that have any."""

from dataclasses import dataclass
from typing import Final

import torch

from tokenmesh.engine.plan import NewRow
from tokenmesh.engine.sampling.device_tables import (
    DeviceTables,
    Shape,
    Slots,
    mask_words,
    num_mask_words,
)
from tokenmesh.kernels.logit_bias import LimitRows

_NUMBERS: Final = ("has_allowed", "num_edits", "min_tokens", "num_words")
_RAGGED: Final = ("edit_ids", "edit_bias", "edit_is_stop", "word_ends", "word_tokens", "recent")


@dataclass(frozen=True, slots=True)
class _Limits:
    """One row's, on the host."""

    allowed: list[int] | None
    bias: dict[int, float]
    stops: set[int]
    """Empty when the output is long enough."""
    words: list[list[int]]
    output: list[int]

    def is_anything(self) -> bool:
        return bool(self.allowed is not None or self.bias or self.stops or self.words)

    def num_recent(self) -> int:
        """Output tokens that bad words are compared with."""
        return max((len(word) - 1 for word in self.words), default=0)


class DeviceLimits:
    """It says which tokens a row may draw. Tables grow with the longest list of any row."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        device: torch.device,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._slots = Slots()
        self._slot = DeviceTables.zeros({"slot": Shape(max_num_seqs, 1, torch.int32)}, device)
        self._slot.flat.fill_(-1)
        self._widths = dict.fromkeys(_RAGGED, 1)
        self._tables = DeviceTables.zeros(self._shapes(1), device)
        self.rows = self._rows()

    def add(self, new: NewRow) -> None:
        """Take a row, when it needs any of this. Ids outside the vocabulary have no effect."""
        limits = self._limits(new)
        if not limits.is_anything():
            return
        slot = self._slots.allocate(new.row)
        edits = sorted({*limits.bias, *limits.stops})
        ragged = {
            "edit_ids": torch.tensor(edits, dtype=torch.int32),
            "edit_bias": torch.tensor([limits.bias.get(token, 0.0) for token in edits]),
            "edit_is_stop": torch.tensor([token in limits.stops for token in edits]).int(),
            "word_ends": torch.tensor([len(word) for word in limits.words]).cumsum(0).int(),
            "word_tokens": torch.tensor([t for w in limits.words for t in w]).int(),
            "recent": torch.full((max(1, limits.num_recent()),), -1, dtype=torch.int32),
        }
        self._grow({name: len(values) for name, values in ragged.items()})
        width = self._widths["recent"]
        newest = [*reversed(limits.output[-width:])]
        ragged["recent"] = torch.tensor(newest + [-1] * (width - len(newest)), dtype=torch.int32)
        numbers = {
            "has_allowed": limits.allowed is not None,
            "num_edits": len(edits),
            "min_tokens": new.sampling.min_tokens,
            "num_words": len(limits.words),
        }
        self._slot.stage_number("slot", new.row, slot)
        for name, number in numbers.items():
            self._tables.stage_number(name, slot, number)
        for name, values in ragged.items():
            self._tables.stage(name, slot, values)
        if limits.allowed is not None:
            mask = mask_words(torch.tensor(limits.allowed).long(), self._vocab_size)
            self._tables.stage("allowed", slot, mask)

    def remove(self, number: int) -> None:
        if self._slots.free(number):
            self._slot.stage_number("slot", number, -1)

    def apply(self) -> None:
        self._slot.apply()
        self._tables.apply()

    def __contains__(self, number: int) -> bool:
        return number in self._slots

    def _limits(self, new: NewRow) -> _Limits:
        params = new.sampling
        output = new.token_ids[new.num_prompt :]
        # also with ignore_eos, as in vLLM
        is_short = len(output) < params.min_tokens
        stops = {*params.stop_token_ids, *self._eos_token_ids} if is_short else set()
        allowed = params.allowed_token_ids
        return _Limits(
            allowed=None if allowed is None else [t for t in allowed if self._is_known(t)],
            bias={t: bias for t, bias in params.logit_bias.items() if self._is_known(t)},
            stops={token for token in stops if self._is_known(token)},
            words=[word for word in params.bad_words_ids if word and self._is_known(word[-1])],
            output=output,
        )

    def _is_known(self, token: int) -> bool:
        return 0 <= token < self._vocab_size

    def _grow(self, needed: dict[str, int]) -> None:
        """Make the tables large enough; new columns of `recent` are older than any word needs."""
        widths = {n: max(width, _power_of_2(needed[n])) for n, width in self._widths.items()}
        if widths != self._widths or self._slots.capacity > len(self.rows.num_edits):
            self._widths = widths
            self._tables = self._tables.resized(self._shapes(self._slots.capacity))
            self.rows = self._rows()

    def _shapes(self, capacity: int) -> dict[str, Shape]:
        numbers = {name: Shape(capacity, 1, torch.int32) for name in _NUMBERS}
        ragged = {name: Shape(capacity, width, torch.int32) for name, width in self._widths.items()}
        ragged["edit_bias"] = Shape(capacity, self._widths["edit_bias"], torch.float32)
        words = num_mask_words(self._vocab_size)
        return numbers | ragged | {"allowed": Shape(capacity, words, torch.int32)}

    def _rows(self) -> LimitRows:
        numbers = {name: self._tables.column(name) for name in _NUMBERS}
        ragged = {name: self._tables.tables[name] for name in (*_RAGGED, "allowed")}
        return LimitRows(slot=self._slot.column("slot"), **numbers, **ragged)


def _power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
