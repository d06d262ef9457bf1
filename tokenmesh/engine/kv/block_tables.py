"""Block tables: the KV blocks that requests hold, from a prefix hit to the last one they need."""

from collections.abc import Sequence

from tokenmesh.engine.kv.block_pool import NULL_BLOCK
from tokenmesh.engine.kv.prefix_cache import PrefixCache
from tokenmesh.engine.request.request import Request

Hits = list[list[int]]
"""It has for each group the first blocks of a table, null where a window group does not need them.
All of the first group's are null where a hit is a saved state and nothing else."""


class BlockTables:
    """Writes `blocks`, `windowed`, `capacity` and `began_with` of requests; others read them.

    A window group's table is as long as the others, with the null block for what is behind. It
    reaches ahead by no more than a chunk, so a long prompt takes no more than it will keep.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._pool = cache.pool
        self._cache = cache
        self._groups = cache.groups
        self._size = cache.groups.block_size

    def find(self, request: Request, reserve: int) -> Hits | None:
        """Return what the prefix cache has for it; None when there are not enough blocks for the
        rest.

        reserve: free blocks that must be left.
        """
        hits = self._cache.find(request)
        if request.spec.is_whole:
            return hits
        num_hits = len(hits[0])
        num_new = -(-request.num_known // self._size) - num_hits + hits[0].count(NULL_BLOCK)
        for _ in hits[1:]:
            num_new += self._reach(request, num_hits * self._size) - num_hits
        num_revived = sum(
            self._pool.ref_count(block) == 0 for table in hits for block in table if block
        )
        return hits if num_revived + num_new + reserve <= self._pool.num_free else None

    def give(self, request: Request, hits: Hits) -> None:
        """The hits, and blocks for every known token: a prefill never runs dry.

        A request that keeps nothing gets none.
        """
        for table in hits:
            self._pool.share(block for block in table if block != NULL_BLOCK)
        request.kv.blocks, request.kv.windowed = hits[0], hits[1:]
        if request.spec.is_whole:
            return
        num_hits = len(request.kv.blocks)
        if NULL_BLOCK in request.kv.blocks:
            request.kv.blocks = self._pool.allocate(num_hits)
        request.kv.began_with = self._cache.take_state(request, num_hits)
        self._cache.images.note_hits(request, num_hits)
        num_new = -(-request.num_known // self._size) - num_hits
        request.kv.blocks += self._pool.allocate(num_new)
        request.kv.capacity = len(request.kv.blocks) * self._size
        if request.kv.windowed:
            request.kv.num_behind = self._groups.behind(num_hits * self._size)
            self._extend(request, self._reach(request, num_hits * self._size))

    def missing(self, request: Request) -> int:
        """Blocks that a prefilling request needs for its next chunk.

        Its window groups give up what is behind first. That frees as many as it needs, unless
        others share them.
        """
        self.drop_behind(request, request.num_computed)
        reach = self._reach(request, request.num_computed)
        return sum(max(0, reach - len(table)) for table in request.kv.windowed)

    def advance(self, request: Request) -> None:
        """Take the missing blocks; there must be as many free ones."""
        self._extend(request, self._reach(request, request.num_computed))

    def take_new(self, request: Request) -> list[list[int]]:
        """The entries of each window group that the runner does not know yet."""
        first = request.kv.num_planned
        if not request.kv.windowed or first == len(request.kv.windowed[0]):
            return []
        request.kv.num_planned = len(request.kv.windowed[0])
        return [table[first:] for table in request.kv.windowed]

    def drop_behind(self, request: Request, start: int) -> None:
        """Free the blocks that no query from `start` on sees."""
        if not request.kv.windowed:
            return
        first, end = request.kv.num_behind, self._groups.behind(start)
        for table in request.kv.windowed if end > first else ():
            self._pool.free(table[first:end])
            table[first:end] = [NULL_BLOCK] * (end - first)
        request.kv.num_behind = max(first, end)

    def grow(self, request: Request) -> int:
        """One block more in each group; that of the first. There must be `growth` free ones."""
        block = self._pool.allocate_one()
        request.kv.blocks.append(block)
        request.kv.capacity += self._size
        if request.kv.windowed:
            self._extend(request, len(request.kv.blocks))
        return block

    def release(self, request: Request) -> None:
        """Give all of them back."""
        self._cache.images.touch(request, request.num_computed // self._size)
        self._pool.free(request.kv.blocks)
        for table in request.kv.windowed:
            self._pool.free(table[request.kv.num_behind :])
        request.kv.blocks, request.kv.windowed = [], []
        request.kv.began_with = None
        request.kv.capacity = request.kv.num_behind = request.kv.num_planned = 0

    def _reach(self, request: Request, start: int) -> int:
        """The length of a window group's table while a chunk from `start` on is computed."""
        behind = self._groups.behind(start)
        return min(-(-request.num_known // self._size), behind + self._groups.most_held)

    def _extend(self, request: Request, length: int) -> None:
        for table in request.kv.windowed:
            table += self._pool.allocate(max(0, length - len(table)))


def held_by(request: Request) -> Sequence[Sequence[int]]:
    """The blocks that a request holds, of each group."""
    return [request.kv.blocks, *(table[request.kv.num_behind :] for table in request.kv.windowed)]
