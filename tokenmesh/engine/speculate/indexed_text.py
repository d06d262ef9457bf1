"""IndexedText: a text that grows, in which the longest match with the end of another is found.

The work for a token and for a match does not depend on the length of the text.
"""

from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

Text = Sequence[int]
"""Ids: a list, or an array of 32 bits; texts that are compared have one type."""

CHUNK: Final = 2048
"""Tokens that one call indexes at most, so that a long prompt holds up no step."""
_FEW: Final = 16
"""Up to so many tokens are faster one by one than with numpy."""
_MIN_SLOTS: Final = 1 << 10
_MAX_WALK: Final = 16
"""Ends of a slot that are looked at: other runs of tokens share it by chance."""
_MULTIPLIER: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1
_WORD: Final = 4


class Match(NamedTuple):
    """Tokens of a text that are the same as the last ones of another, or its own."""

    end: int
    """The position after them."""
    length: int


class _Runs:
    """Where the runs of `length` tokens end: a hash table without keys.

    A slot has the end of its latest run, and each end a link to the one before it in its slot. What
    is found is compared with the text, so 32-bit positions are all that is kept.
    """

    __slots__ = ("heads", "length", "links")

    def __init__(self, length: int, num_slots: int) -> None:
        self.length = length
        self.heads = array("i", bytes(_WORD * num_slots))
        """By slot: the latest end; 0: none."""
        self.links = array("i", bytes(_WORD))
        """By end: the one before it in its slot."""

    def add(self, slots: np.ndarray, first: int) -> None:
        """Many at once: the slots of the runs that end at `first` and after it."""
        # runs of the same slot one after the other, each linked to the one before it
        order = np.argsort(slots, kind="stable")
        slots, ends = slots[order], (order + first).astype(np.int32)
        is_first = np.ones(len(slots), dtype=bool)
        is_first[1:] = slots[1:] != slots[:-1]
        heads = np.frombuffer(self.heads, dtype=np.int32)
        before = np.empty_like(ends)
        before[1:] = ends[:-1]
        before[is_first] = heads[slots[is_first]]
        links = np.empty_like(ends)
        links[order] = before
        is_last = np.roll(is_first, -1)
        heads[slots[is_last]] = ends[is_last]
        self.links.frombytes(links.tobytes())


class IndexedText:
    """Ids and the ends of their runs, of several lengths; a run that ends the text is not in."""

    def __init__(self, ids: Text, lengths: Sequence[int]) -> None:
        """The ids are the caller's, who may append to them."""
        self.ids = ids
        self._lengths = sorted(lengths, reverse=True)
        self._runs: list[_Runs] = []
        self._shift = 0
        self._latest: tuple[int, list[int]] = (0, [])
        """An end of this text, and the slots of the runs there: they are taken in next."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the index: 6 to 12 a token and length."""
        if not self._runs:
            return 0
        # those of all lengths have the same sizes
        return _WORD * len(self._runs) * (len(self._runs[0].heads) + len(self._runs[0].links))

    def update(self) -> bool:
        """Index what was appended; False: there is more than one call takes.

        A table that is full is made anew, twice as large.
        """
        ids, longest = self.ids, self._lengths[0]
        if not self._runs or len(ids) > len(self._runs[0].heads):
            self._make_tables()
        first = len(self._runs[0].links)
        last = min(len(ids), first + CHUNK)
        # the many are of all lengths: not before the longest run can end
        few = last if last - first <= _FEW else min(last, max(first, longest))
        for end in range(first, few):
            known, slots = self._latest
            if known != end:
                slots = self._slots(ids[max(0, end - longest) : end])
            for runs, slot in zip(self._runs, slots, strict=True):
                runs.links.append(runs.heads[slot] if slot >= 0 else 0)
                if slot >= 0:
                    runs.heads[slot] = end
        if few < last:
            for runs, many in zip(self._runs, self._many_slots(few, last), strict=True):
                runs.add(many, few)
        return last == len(ids)

    def find(self, tail: Text, most: int) -> Match | None:
        """The longest match with the end of `tail`, the last one of its length, up to `most`
        tokens; None: there is none of any of the lengths. `tail` may be the ids themselves."""
        if not self._runs:
            return None
        slots = self._slots(tail[-self._lengths[0] :])
        if tail is self.ids:
            self._latest = (len(tail), slots)
        for runs, slot in zip(self._runs, slots, strict=True):
            if slot >= 0 and (end := self._end_of(runs, slot, tail)):
                return Match(end, self._length_of(end, runs.length, tail, most))
        return None

    def after(self, end: int, limit: int) -> list[int]:
        """Up to `limit` tokens from a position on; behind its end the text repeats them."""
        found = list(self.ids[end : end + limit])
        period = len(found)
        while period and len(found) < limit:
            found.append(found[-period])
        return found

    def _make_tables(self) -> None:
        num_slots = max(_MIN_SLOTS, 1 << len(self.ids).bit_length())
        self._shift = 65 - num_slots.bit_length()
        self._runs = [_Runs(length, num_slots) for length in self._lengths]
        self._latest = (0, [])

    def _end_of(self, runs: _Runs, slot: int, tail: Text) -> int:
        """The latest end of the run that `tail` ends with; 0: there is none."""
        ids, length, end = self.ids, runs.length, runs.heads[slot]
        wanted = tail[-length:]
        for _ in range(_MAX_WALK):
            if end == 0 or ids[end - length : end] == wanted:
                return end
            end = runs.links[end]
        return 0

    def _length_of(self, end: int, length: int, tail: Text, most: int) -> int:
        ids, longest = self.ids, min(most, end, len(tail))
        while length < longest and ids[end - length - 1] == tail[-length - 1]:
            length += 1
        return length

    def _slots(self, run: Text) -> list[int]:
        """Return the slots of the runs that end where this one does, longest first; -1 for those it
        is too short for."""
        mixed, slots = 0, dict.fromkeys(self._lengths, -1)
        for length, token in enumerate(reversed(run), start=1):
            mixed = (mixed + token + 1) * _MULTIPLIER & _MASK
            if length in slots:
                slots[length] = mixed >> self._shift
        return list(slots.values())

    def _many_slots(self, first: int, last: int) -> list[np.ndarray]:
        """Return the slots of the runs that end at `first` up to before `last`, by length, longest
        first."""
        longest, num_ends = self._lengths[0], last - first
        ids = np.array(self.ids[first - longest : last - 1], dtype=np.uint64)
        mixed = np.zeros(num_ends, dtype=np.uint64)
        found = []
        for length in range(1, longest + 1):
            start = longest - length
            mixed += ids[start : start + num_ends] + np.uint64(1)
            mixed *= np.uint64(_MULTIPLIER)
            if length in self._lengths:
                found.append((mixed >> np.uint64(self._shift)).astype(np.int64))
        return found[::-1]
