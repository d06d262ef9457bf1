"""LiveRequests: the requests of a scheduler, from their arrival to their end or preemption.

A request waits, computes its known tokens (it prefills), then decodes. Here it changes from one to
the other, and with that gets or loses its row and its blocks.
"""

from collections.abc import Iterable
from itertools import count

from tokenmesh.engine.core.decode_wheel import DecodeWheel
from tokenmesh.engine.core.end_detector import EndDetector
from tokenmesh.engine.core.in_flight import StepNotes
from tokenmesh.engine.core.recent_use import RecentUse
from tokenmesh.engine.core.row_table import RowTable
from tokenmesh.engine.core.service_queue import ServiceQueue
from tokenmesh.engine.core.waiting import WaitingRequests
from tokenmesh.engine.kv.block_tables import BlockTables, Hits
from tokenmesh.engine.kv.prefix_cache import PrefixCache
from tokenmesh.engine.request.request import Request, Status
from tokenmesh.shared.config.worker import WorkerSettings


class LiveRequests:
    """Owns queues, rows and blocks of requests; what reads and plans them is handed this."""

    def __init__(self, settings: WorkerSettings, cache: PrefixCache, num_lanes: int = 1) -> None:
        self.num_lanes = num_lanes
        self.lane = 0
        """The lane whose step is planned."""
        self._block_size = settings.block_size
        self._watermark_blocks = int(settings.kv_watermark * cache.pool.num_blocks)
        """Free blocks that an admission leaves to the running requests."""
        self._cache = cache
        self._arrivals = count()
        self.tables = BlockTables(cache)
        self.rows = RowTable(settings.num_rows)
        self.recent = RecentUse(settings.num_rows, settings.max_num_batched_tokens)
        """It counts the tokens that each tenant had lately."""
        self.waiting = WaitingRequests(self.rows, self.recent)
        self.running = ServiceQueue()
        self.prefilling = ServiceQueue()
        """Running requests are here until all their known tokens are computed."""
        self.wheel = DecodeWheel(num_lanes)
        """The others, but for those whose last token is on its way."""
        self.ends = EndDetector()
        self.num_queued_tokens = 0
        """Sum of `backlog` over all requests."""
        self.notes = StepNotes()
        """About the latest step."""

    def select(self, lane: int) -> None:
        """Plan a step of this lane from here on."""
        self.lane = lane
        self.wheel.select(lane)

    def in_lane(self, requests: Iterable[Request]) -> list[Request]:
        """Return the running requests that the lane's steps compute tokens of."""
        if self.num_lanes == 1:
            return list(requests)
        return [each for each in requests if each.place.lane == self.lane]

    @property
    def num_running_in_lane(self) -> int:
        if self.num_lanes == 1:
            return len(self.running)
        return sum(each.place.lane == self.lane for each in self.running)

    @property
    def has_room_in_lane(self) -> bool:
        """Return whether one that waits may join the lane: another one may have fewer requests."""
        if self.num_lanes == 1:
            return True
        num_live = len(self.running) + len(self.waiting)
        return self.num_running_in_lane * self.num_lanes < num_live

    @property
    def is_one(self) -> bool:
        """Return whether there is a single request."""
        return len(self.running) + len(self.waiting) == 1

    def add(self, request: Request) -> None:
        """Take a request; its tokens must fit the pool."""
        if not request.spec.is_whole:
            needed = self._cache.groups.needed(request.spec.max_len - 1)
            assert needed < self._cache.pool.num_blocks
        request.place.arrival = next(self._arrivals)
        request.place.status = Status.WAITING
        num_hits = len(self._cache.find(request)[0])
        num_hits += self._cache.images.count(request, num_hits, request.num_known)
        request.place.num_expected = num_hits * self._block_size
        self.waiting.add(request)
        self.num_queued_tokens += request.backlog

    def remove(self, request: Request) -> None:
        """The request ends, wherever it is; its row and blocks are free at once."""
        self._cache.images.unpin(request)
        if request.place.status is Status.RUNNING:
            self.num_queued_tokens -= request.backlog
            self.running.remove(request)
            self._release(request)
        elif request.place.status is Status.WAITING:
            self.num_queued_tokens -= request.backlog
            self.waiting.remove(request)
        request.place.status = Status.ENDED

    def find(self, request: Request) -> Hits | None:
        """Return what a waiting request would share; None: there are no blocks for the rest."""
        return self.tables.find(request, self._watermark_blocks if len(self.running) else 0)

    def place(self, request: Request, hits: Hits, step: int) -> None:
        """Give a request that waited its row and its blocks."""
        self.waiting.remove(request)
        self.num_queued_tokens -= request.backlog
        request.place.lane = self.lane
        self.wheel.begin(request, num_cached := len(hits[0]) * self._block_size)
        self.tables.give(request, hits)
        request.place.num_expected = 0
        self.num_queued_tokens += request.backlog
        if request.place.num_cached is None:
            request.place.num_cached = min(num_cached, request.num_prompt)
        self.rows.give(request, step)
        self.ends.join(request)
        request.place.status = Status.RUNNING
        self.running.add(request)

    def preempt(self, request: Request) -> None:
        """Send a running request back to wait; all it knows will be computed again."""
        self.running.remove(request)
        self.requeue(request)

    def requeue(self, request: Request) -> None:
        """The request was preempted and has left the running ones already."""
        self._send_back(request)
        request.place.num_preemptions += 1
        self.notes.preempted.append(request)

    def restart_outgrown(self) -> None:
        """Send back those that need other keys from now on, and do not count as preempted."""
        for request in self.wheel.outgrown():
            self.running.remove(request)
            self._send_back(request)

    def _send_back(self, request: Request) -> None:
        """Give row and blocks back and wait; everything is computed again."""
        self._release(request)
        self.num_queued_tokens -= request.backlog
        self.wheel.begin(request, 0)
        request.place.status = Status.WAITING
        self.num_queued_tokens += request.backlog
        self.waiting.add(request)

    def _release(self, request: Request) -> None:
        if request.decode.is_prefilling:
            self.prefilling.remove(request)
        else:
            self.wheel.leave(request)
        self.ends.leave(request)
        self.tables.release(request)
        self.rows.take(request)
