"""PrefixLookup: the longest run of a prompt's first blocks that the pool has."""

from collections.abc import Sequence

from tokenmesh.engine.kv.block_pool import NULL_BLOCK, BlockPool, KvGroups
from tokenmesh.engine.kv.saved_states import SavedStates


class PrefixLookup:
    """Only reads: what it finds is not held for a request yet."""

    def __init__(
        self, pool: BlockPool, groups: KvGroups, marks: Sequence[bytes], states: SavedStates | None
    ) -> None:
        """marks: of the keys of window groups. states: None where rows keep none."""
        self._pool = pool
        self._hit_blocks = groups.hit_blocks
        self._marks = marks
        self._states = states

    def known(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the first group up to the first hash that the pool lacks."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._pool.find(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def usable(self, hashes: Sequence[bytes], found: list[int]) -> list[list[int]]:
        """Return how much of a run a request can begin with, as its tables of all groups.

        found: the blocks of the first of the hashes.
        """
        if self._states is not None:
            return [self._up_to_state(self._states, hashes, found)]
        return self._within_windows(hashes, found) if self._marks else [found]

    def _up_to_state(
        self, states: SavedStates, hashes: Sequence[bytes], found: list[int]
    ) -> list[int]:
        """Cut a run where there is a saved state; null blocks where that is all it takes."""
        if not states.needs_blocks:
            found = [NULL_BLOCK] * len(hashes)
        lengths = range(len(found), 0, -1)
        return found[: next((each for each in lengths if states.find(hashes[each - 1])), 0)]

    def _within_windows(self, hashes: Sequence[bytes], found: list[int]) -> list[list[int]]:
        """Cut a run where every window group has the blocks that a query after it sees."""
        wanted = self._hit_blocks
        tables: list[list[int]] = [[] for _ in self._marks]
        length = run = 0
        for index, block_hash in enumerate(hashes[: len(found)]):
            blocks = [self._pool.find(block_hash + mark) for mark in self._marks]
            for table, block in zip(tables, blocks, strict=True):
                table.append(block or NULL_BLOCK)
            run = run + 1 if None not in blocks else 0
            if run >= min(wanted, index + 1):
                length = index + 1
        unseen = max(0, length - wanted)
        cut = ([NULL_BLOCK] * unseen + table[unseen:length] for table in tables)
        return [found[:length], *cut]
