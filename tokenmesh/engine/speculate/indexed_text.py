"""IndexedText: a text that grows, in which the longest match with the end of another is found.

The work for a token and for a match does not depend on the length of the text.
"""

from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Text = Sequence[int]
"""Ids: a list, or an array of 32 bits; texts that are compared have one type."""

CHUNK: Final = 2048
"""Tokens that one call indexes at most, so that a long prompt holds up no step."""
_FEW: Final = 16
"""Up to so many tokens are faster one by one than with numpy."""
_MIN_SLOTS: Final = 1 << 10
_MAX_WALK: Final = 16
"""Ends of a slot that are looked at: other runs of tokens share it by chance."""
_HASH_BITS: Final = 29
"""With a token added, a hash is still one digit of Python's integers: products of two are fast."""
_MASK: Final = (1 << _HASH_BITS) - 1
_MULTIPLIER: Final = 0x278DDE6D
_WORD: Final = 4


class Match(NamedTuple):
    """Tokens of a text that are the same as the last ones of another, or its own."""

    end: int
    """The position after them."""
    length: int


class IndexedText:
    """Ids and the ends of their runs, of several lengths; a run that ends the text is not in.

    A hash table without keys for each length: a slot has the end of its latest run, and each end a
    link to the one before it in its slot. What is found is compared with the text, so 32-bit
    positions are all that is kept.
    """

    def __init__(self, ids: Text, lengths: Sequence[int]) -> None:
        """The ids are the caller's, who may append to them."""
        self.ids = ids
        self._lengths = sorted(lengths, reverse=True)
        self._num_slots = 0
        """Each length has so many."""
        self._shift = 0
        self._places: list[tuple[int, int]] = []
        """They hold each length's first slot, and the length; the longest comes first."""
        self._heads = array("i")
        """By slot: the latest end; 0: none. The last one is that of runs that are too long."""
        self._links = array("i")
        """They hold, by end and length, the end before it in its slot."""
        self._mixed: list[int] = []
        """By length from 1 on: the hash of the run that ends where the next one to index does."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the index: 6 to 12 a token and length."""
        return _WORD * (len(self._heads) + len(self._links))

    def update(self) -> bool:
        """Index what was appended; False: there is more than one call takes.

        A table that is full is made anew, twice as large.
        """
        ids, longest = self.ids, self._lengths[0]
        if len(ids) > self._num_slots:
            self._make_tables()
        first = len(self._links) // len(self._lengths)
        last = min(len(ids), first + CHUNK)
        # the many are of all lengths: not before the longest run can end
        few = last if last - first <= _FEW else min(last, max(first, longest))
        self._add_few(first, few)
        if few < last:
            self._add_many(few, last)
        return last == len(ids)

    def find(self, tail: Text, most: int) -> Match | None:
        """The longest match with the end of `tail`, the last one of its length, up to `most`
        tokens; None: there is none of any of the lengths. `tail` may be the ids themselves."""
        if not self._num_slots:
            return None
        size, count, heads, shift = len(tail), len(self._lengths), self._heads, self._shift
        is_next = tail is self.ids and len(self._links) == size * count
        mixed = self._mixed if is_next else self._mixed_of(tail[-self._lengths[0] :])
        base, length = self._places[-1]
        if length > size or not heads[base + (mixed[length - 1] >> shift)]:
            return None  # nor is a longer run there
        for index, (base, length) in enumerate(self._places):
            if length > size:
                continue
            end = heads[base + (mixed[length - 1] >> shift)]
            if end and (end := self._end_of(index, length, end, tail)):
                return Match(end, self._length_of(end, length, tail, most))
        return None

    def after(self, end: int, limit: int) -> list[int]:
        """Up to `limit` tokens from a position on; behind its end the text repeats them."""
        found = list(self.ids[end : end + limit])
        period = len(found)
        while period and len(found) < limit:
            found.append(found[-period])
        return found

    def _make_tables(self) -> None:
        self._num_slots = max(_MIN_SLOTS, 1 << len(self.ids).bit_length())
        self._shift = 1 + _HASH_BITS - self._num_slots.bit_length()
        self._places = [(n * self._num_slots, each) for n, each in enumerate(self._lengths)]
        self._heads = array("i", bytes(_WORD * (len(self._lengths) * self._num_slots + 1)))
        self._links = array("i")
        self._mixed = self._mixed_of(())

    def _add_few(self, first: int, last: int) -> None:
        """Add the runs that end at `first` up to before `last`."""
        ids, longest, mixed = self.ids, self._lengths[0], self._mixed
        places, heads, links, shift = self._places, self._heads, self._links, self._shift
        for end in range(first, last):
            if end < longest:
                slots = [
                    base + (mixed[length - 1] >> shift) if length <= end else -1
                    for base, length in places
                ]
            else:
                slots = [base + (mixed[length - 1] >> shift) for base, length in places]
            links.extend([heads[slot] for slot in slots])
            for slot in slots:
                heads[slot] = end
            heads[-1] = 0
            token = ids[end] + 1
            mixed = [(each + token) * _MULTIPLIER & _MASK for each in (0, *mixed[:-1])]
        self._mixed = mixed

    def _add_many(self, first: int, last: int) -> None:
        """Add the same with numpy; each run is as long as it is to be."""
        longest, num_ends = self._lengths[0], last - first
        ids = np.array(self.ids[first - longest : last], dtype=np.uint64) + np.uint64(1)
        mixed, factor = np.zeros(num_ends, dtype=np.uint64), 1
        heads = np.frombuffer(self._heads, dtype=np.int32)
        links = np.empty((num_ends, len(self._lengths)), dtype=np.int32)
        index = len(self._lengths)
        for length in range(1, longest + 1):
            factor = factor * _MULTIPLIER & _MASK
            start = longest - length
            mixed += ids[start : start + num_ends] * np.uint64(factor)
            if length in self._lengths:
                index -= 1
                base, _ = self._places[index]
                slots = ((mixed & _MASK) >> np.uint64(self._shift)).astype(np.int64) + base
                links[:, index] = _linked(heads, slots, first)
        self._links.frombytes(links.tobytes())
        self._mixed = self._mixed_of(self.ids[last - longest : last])

    def _end_of(self, index: int, length: int, end: int, tail: Text) -> int:
        """Return the latest end, from this one of its slot on, of the run that `tail` ends with;
        0: there is none."""
        ids, links, count = self.ids, self._links, len(self._lengths)
        token, wanted = tail[-1], tail[-length:]
        for _ in range(_MAX_WALK):
            # most that are there by chance end with another token
            if ids[end - 1] == token and ids[end - length : end] == wanted:
                return end
            end = links[end * count + index]
            if not end:
                break
        return 0

    def _length_of(self, end: int, length: int, tail: Text, most: int) -> int:
        ids, longest = self.ids, min(most, end, len(tail))
        if longest > length and ids[end - longest : end] == tail[-longest:]:
            return longest
        while length < longest and ids[end - length - 1] == tail[-length - 1]:
            length += 1
        return length

    def _mixed_of(self, run: Text) -> list[int]:
        """Return the hashes of the runs that end where this one does, by length from 1 on."""
        mixed, factor, found = 0, 1, []
        for token in reversed(run):
            factor = factor * _MULTIPLIER & _MASK
            mixed = mixed + (token + 1) * factor & _MASK
            found.append(mixed)
        return found + [mixed] * (self._lengths[0] - len(found))


def _linked(
    heads: npt.NDArray[np.int32], slots: npt.NDArray[np.int64], first: int
) -> npt.NDArray[np.int32]:
    """Add the runs that end at `first` and after it to the heads of these slots; return the link of
    each."""
    # runs of the same slot one after the other, each linked to the one before it
    order = np.argsort(slots, kind="stable")
    slots, ends = slots[order], (order + first).astype(np.int32)
    is_first = np.ones(len(slots), dtype=bool)
    is_first[1:] = slots[1:] != slots[:-1]
    before = np.empty_like(ends)
    before[1:] = ends[:-1]
    before[is_first] = heads[slots[is_first]]
    links = np.empty_like(ends)
    links[order] = before
    is_last = np.roll(is_first, -1)
    heads[slots[is_last]] = ends[is_last]
    return links
