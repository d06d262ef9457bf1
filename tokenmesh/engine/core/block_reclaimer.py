"""Free blocks for running requests, by preempting others where the pool has none."""

from collections.abc import Callable

from tokenmesh.engine.core.row_table import RowTable
from tokenmesh.engine.core.service_queue import ServiceQueue
from tokenmesh.engine.kv.block_pool import BlockPool
from tokenmesh.engine.kv.block_tables import BlockTables
from tokenmesh.engine.request.request import Request, Status


class BlockReclaimer:
    def __init__(
        self,
        pool: BlockPool,
        tables: BlockTables,
        running: ServiceQueue,
        rows: RowTable,
        requeue: Callable[[Request], None],
    ) -> None:
        """`requeue`: sends a request that has left the running ones back to wait."""
        self._pool = pool
        self._tables = tables
        self._running = running
        self._rows = rows
        self._requeue = requeue

    def make(self, request: Request, num_blocks: int) -> bool:
        """That many free blocks; False when it is `request` itself that has to give way."""
        while self._pool.num_free < num_blocks:
            victim = self._running.pop_last()
            self._rows.expect_late(victim)
            self._requeue(victim)
            if victim is request:
                return False
        return True

    def advance_windows(self, prefilling: ServiceQueue) -> None:
        """Blocks of the window groups for the next chunk of each prompt.

        Before rows are put into the step's plan, because some may have to give way.
        """
        for request in list(prefilling):
            if request.place.status is not Status.RUNNING:
                continue  # it has given way to one before it
            missing = self._tables.missing(request)
            if missing and self.make(request, missing):
                self._tables.advance(request)
