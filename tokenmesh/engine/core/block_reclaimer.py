"""Free blocks for running requests, by preempting others where the pool has none."""

from tokenmesh.engine.core.live_requests import LiveRequests
from tokenmesh.engine.kv.block_pool import BlockPool
from tokenmesh.engine.request.request import Request, Status


class BlockReclaimer:
    """Preempts the running request that is served last, as often as it takes."""

    def __init__(self, live: LiveRequests, pool: BlockPool) -> None:
        self._live = live
        self._pool = pool

    def make(self, request: Request, num_blocks: int) -> bool:
        """That many free blocks; False when it is `request` itself that has to give way."""
        while self._pool.num_free < num_blocks:
            victim = self._live.running.pop_last()
            # of more than two lanes steps of others may land before its own: it draws again then
            if self._live.num_lanes <= 2:
                self._live.rows.expect_late(victim)
            self._live.requeue(victim)
            if victim is request:
                return False
        return True

    def advance_windows(self) -> None:
        """Blocks of the window groups for the next chunk of each prompt.

        Before rows are put into the step's plan, because some may have to give way.
        """
        tables = self._live.tables
        for request in list(self._live.prefilling):
            if request.place.status is not Status.RUNNING:
                continue  # it has given way to one before it
            missing = tables.missing(request)
            if missing and self.make(request, missing):
                tables.advance(request)
