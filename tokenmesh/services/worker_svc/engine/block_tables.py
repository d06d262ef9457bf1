"""BlockTables: the KV blocks that requests hold, from a prefix hit to the last one they need."""

from collections.abc import Iterable

from tokenmesh.services.worker_svc.engine.block_pool import BlockPool
from tokenmesh.services.worker_svc.engine.prefix_cache import PrefixCache
from tokenmesh.services.worker_svc.engine.request import Request


class BlockTables:
    """Writes `blocks` and `capacity` of requests; the rest of the engine reads them."""

    def __init__(self, pool: BlockPool, cache: PrefixCache, block_size: int) -> None:
        self._pool = pool
        self._cache = cache
        self._size = block_size

    def find(self, request: Request, reserve: int) -> list[int] | None:
        """What the prefix cache has for it; None when there are not enough blocks for the rest.

        reserve: free blocks that must be left.
        """
        hits = self._cache.find(request)
        num_new = -(-request.num_known // self._size) - len(hits)
        num_revived = sum(self._pool.ref_count(block) == 0 for block in hits)
        return hits if num_revived + num_new + reserve <= self._pool.num_free else None

    def give(self, request: Request, hits: Iterable[int]) -> None:
        """The hits, and blocks for every known token: a prefill never runs dry."""
        request.blocks = list(hits)
        self._pool.share(request.blocks)
        num_new = -(-request.num_known // self._size) - len(request.blocks)
        request.blocks += self._pool.allocate(num_new)
        request.capacity = len(request.blocks) * self._size

    def grow(self, request: Request) -> int:
        """One block more, which is returned; there must be a free one."""
        block = self._pool.allocate_one()
        request.blocks.append(block)
        request.capacity += self._size
        return block

    def release(self, request: Request) -> None:
        """Give all of them back."""
        self._pool.free(request.blocks)
        request.blocks = []
        request.capacity = 0
