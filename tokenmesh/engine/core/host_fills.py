"""HostFills: which blocks of a prompt are copied from the host tier in a step."""

import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

from tokenmesh.engine.core.sharing import Sharing
from tokenmesh.engine.kv.prefix_cache import PrefixCache
from tokenmesh.engine.request.request import Request
from tokenmesh.shared.config.worker import WorkerSettings

FILLED_PER_COMPUTED: Final = 8
"""Tokens that are copied in the time of one that is computed: what a step's budget counts."""


class Fills(NamedTuple):
    """The next blocks of a prompt, and what the chunk after them has to be."""

    entries: Sequence[tuple[int, int]] = ()
    """See `ScheduledRow.fills`."""
    num_tokens: int = 0
    cost: int = 0
    """The copies take so many tokens of the step's budget."""
    least_computed: int = 0
    """Where something is copied a token is computed too: a row without one is in no step."""
    most_computed: int = sys.maxsize


NO_FILLS: Final = Fills()


class HostFills:
    def __init__(self, settings: WorkerSettings, cache: PrefixCache, sharing: Sharing) -> None:
        self._cache = cache
        self._sharing = sharing
        self._size = settings.block_size
        self._threshold = settings.long_prefill_token_threshold
        self._max_chunk = settings.max_num_batched_tokens

    def plan(self, request: Request, budget: int, step: int, *, is_alone: bool) -> Fills:
        """Plan the fills of a request that has all blocks of its prompt; `budget` tokens are left
        of the step.
        """
        if self._cache.host is None or request.num_computed % self._size:
            return NO_FILLS
        if self._threshold and not is_alone:
            budget = min(budget, self._threshold)
        first, most = request.num_computed // self._size, self._most(request, budget)
        # one more than may be copied, to know whether the images go on behind
        found = self._cache.images.count(request, first, most + 1)
        # the chunk between two copies is a block, so that the next one begins at a block again
        left_over = self._size if found > most else 1
        cost = min(-(-found * self._size // FILLED_PER_COMPUTED), budget - left_over)
        cost = self._sharing.allowed(request, cost)
        count = min(found, most, cost * FILLED_PER_COMPUTED // self._size)
        if count <= 0:
            return NO_FILLS
        cost = self._sharing.take(request, -(-count * self._size // FILLED_PER_COMPUTED))
        entries = self._cache.images.fill(request, first, count, step)
        least, most_computed = 1, sys.maxsize
        if count < found:
            least = most_computed = self._size
        if request.kv.windowed:
            # its window groups have blocks for one chunk
            most_computed = min(most_computed, self._max_chunk - count * self._size)
        return Fills(entries, count * self._size, cost, least, most_computed)

    def _most(self, request: Request, budget: int) -> int:
        most = (budget - 1) * FILLED_PER_COMPUTED // self._size
        if request.kv.windowed:
            most = min(most, self._max_chunk // self._size - 1)
        return max(0, most)
