"""Saved states: copies of rows' states at block ends, found by requests with the same beginning.

A saved state is found by the hash of the block that it stands behind. It is copied when the step
that computes it ends, and no earlier, so it can be found from the next step on. Copies into and out
of slots are made in the order of the steps, and within a step out of slots first: a slot may be
given away in the very step whose plan reads it. So requests need not hold saved states.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass
from math import gcd, lcm
from typing import Final, Self

from tokenmesh.engine.plan import SavedState

KERNEL_CHUNK: Final = 64
"""Tokens that kernels of the gated delta rule and of Mamba compute at a time."""

MOST_REGULAR: Final = 8


@dataclass(frozen=True, slots=True)
class StateBorders:
    unit: int
    """Each border is a multiple of it, in whole blocks."""
    interval: int
    """The smallest distance of regular borders, and the least that is worth a saved state."""
    most_regular: int

    @classmethod
    def of(cls, interval: int, block_size: int, num_slots: int) -> Self:
        """interval: rounded up to whole blocks. One prompt takes a quarter of the slots at most."""
        interval = -(-interval // block_size) * block_size
        unit = gcd(interval, lcm(block_size, KERNEL_CHUNK))
        return cls(unit, interval, max(1, min(MOST_REGULAR, num_slots // 4)))

    def after(self, start: int, num_known: int, num_matched: int) -> int | None:
        """The first border of the known tokens of a request behind `start`; None: there is none.

        num_matched: at its beginning, tokens that another request had as well. The last known token
        is always computed, so that no border is behind it.
        """
        last = (num_known - 1) // self.unit * self.unit
        spacing = self.interval
        while spacing * self.most_regular < last:
            spacing *= 2
        regular = (start // spacing + 1) * spacing
        if last - regular < self.interval:
            regular = last  # so near to it, it is not worth a separate step
        parting = num_matched // self.unit * self.unit
        wanted = (each for each in (regular, parting, last) if start < each <= last)
        return min((each for each in wanted if each >= self.interval), default=None)

    def cut(self, num_tokens: int, start: int, num_known: int, num_matched: int) -> int:
        """Return how many of `num_tokens` known tokens from `start` on one chunk computes.

        It ends at the first border; one that ends before that ends on the grid where it can.
        """
        end = start + num_tokens
        border = self.after(start, num_known, num_matched)
        if border is not None and end >= border:
            return border - start
        on_grid = end // self.unit * self.unit
        return on_grid - start if start < on_grid and end < num_known else num_tokens


class SavedStates:
    """A bounded number of slots; the least recently found is replaced."""

    def __init__(self, num_slots: int, borders: StateBorders, *, needs_blocks: bool) -> None:
        """needs_blocks: whether layers also keep pages, without which a state is worth nothing."""
        self.borders = borders
        self.needs_blocks = needs_blocks
        self._free = list(range(num_slots - 1, -1, -1))
        self._by_key: OrderedDict[bytes, SavedState] = OrderedDict()
        """Least recently found first."""
        self._fresh: dict[SavedState, None] = {}
        """To be saved by the step at hand."""
        self._num_behind: Counter[bytes] = Counter()
        """By block hash: saved states that need the block."""

    def __len__(self) -> int:
        return len(self._by_key)

    def take_saved(self) -> list[SavedState]:
        """Return what is saved when the step at hand ends. It can be found now."""
        fresh, self._fresh = self._fresh, {}
        return list(fresh)

    def find(self, block_hash: bytes) -> SavedState | None:
        """The state behind that block."""
        saved = self._by_key.get(block_hash)
        return None if saved in self._fresh else saved

    def reaches(self, block_hash: bytes) -> bool:
        """Return whether the block is before a saved state: a hit can use it."""
        return block_hash in self._num_behind

    def use(self, saved: SavedState) -> None:
        """It was found, and gives way later than others."""
        self._by_key.move_to_end(saved.key)

    def knows(self, block_hash: bytes) -> bool:
        """Return whether the state behind that block is saved, or is about to be; it counts as
        found."""
        if block_hash not in self._by_key:
            return False
        self._by_key.move_to_end(block_hash)
        return True

    def save(self, row: int, hashes: list[bytes]) -> tuple[list[int], list[bytes]]:
        """Save the state behind these blocks, which must not be known, when the step ends.

        The numbers of those of them that a saved state reaches only now, and the hashes of blocks
        that none reaches any more.
        """
        lost: list[bytes] = []
        if not self._free:
            lost = self.drop(next(iter(self._by_key.values())))
        saved = SavedState(self._free.pop(), row, hashes)
        self._by_key[saved.key] = saved
        self._fresh[saved] = None
        gained = [index for index, each in enumerate(hashes) if each not in self._num_behind]
        self._num_behind.update(hashes)
        return gained, lost

    def drop(self, saved: SavedState) -> list[bytes]:
        """It can no longer be found; the block hashes that no saved state reaches any more.

        Nothing happens when it was dropped before.
        """
        if self._by_key.get(saved.key) is not saved:
            return []
        del self._by_key[saved.key]
        self._fresh.pop(saved, None)
        self._free.append(saved.slot)
        lost = []
        for each in reversed(saved.hashes):
            if self._num_behind[each] == 1:
                del self._num_behind[each]
                lost.append(each)
            else:
                self._num_behind[each] -= 1
        return lost

    def forget_block(self, block_hash: bytes) -> list[bytes]:
        """A block was evicted: drop all states that need it; the hashes that none reaches now."""
        if block_hash not in self._num_behind:
            return []
        ends_there = self._by_key.get(block_hash)
        lost = self.drop(ends_there) if ends_there is not None else []
        # blocks go from the last to the first, so there is seldom anything left
        if block_hash in self._num_behind:
            for saved in [each for each in self._by_key.values() if block_hash in each.hashes]:
                lost += self.drop(saved)
        return lost

    def drop_all(self) -> None:
        """Nothing can be found any more."""
        for saved in list(self._by_key.values()):
            self.drop(saved)
