"""The decision: argmin of the estimated time to first token over live, undrained workers.

No I/O and no clock: everything that varies is an argument, so that a test can replay a decision.
"""

from dataclasses import dataclass
from typing import Final, Protocol

from tokenmesh.services.scheduler_svc.cost import capacity, estimated_ttft_s, kv_usage
from tokenmesh.services.scheduler_svc.reservations import Reservation, Reservations
from tokenmesh.shared.config.placement import SchedulerSettings
from tokenmesh.shared.ids import WorkerId
from tokenmesh.shared.messages.beat import Heartbeat, WorkerLoad
from tokenmesh.shared.messages.place import Candidate, Place
from tokenmesh.shared.tenant_share import is_within_share

TIE_SHARE: Final = 0.1
INDEX_AWAY: Final = "index away"
"""Why a worker was chosen that nothing but beats were known of."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A live worker of the request's model, as its last beat told it."""

    worker_id: WorkerId
    epoch: int
    load: WorkerLoad
    draining: bool
    beat_at: float
    """When that beat was received, monotonic seconds."""

    @property
    def takes_streams(self) -> bool:
        """Whether it is neither about to leave nor asleep."""
        return not self.draining and self.load.sleep_level == 0


@dataclass(frozen=True, slots=True)
class Decision:
    """Who takes the request (None: everybody is full), and what was weighed."""

    worker: Worker | None
    candidates: list[Candidate]
    reason: str = INDEX_AWAY
    reservation: str = ""


def worker_from_beat(beat: Heartbeat, beat_at: float) -> Worker | None:
    """None for a beat that is no worker's."""
    if beat.load is None:
        return None
    return Worker(WorkerId(beat.instance_id), beat.epoch, beat.load, beat.draining, beat_at)


class Placer(Protocol):
    """Whatever decides for the desk."""

    async def place(self, request: Place, workers: list[Worker], now: float) -> Decision:
        """Choose a worker and reserve on it. Raises nothing."""

    def retry_after_s(self, request: Place, workers: list[Worker]) -> float:
        """How long the least loaded worker needs for what it has; at least one second."""


class Placement:
    """Weighs workers against their load and what was placed on them since their last beat."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self.reservations = Reservations(settings.reservation_settle_s)

    async def place(self, request: Place, workers: list[Worker], now: float) -> Decision:
        """See `Placer.place`."""
        weighed = [
            (worker, self.weigh(request, worker))
            for worker in self.eligible(request, workers)
            if self.has_room(request, worker)
        ]
        candidates = [candidate for _, candidate in weighed]
        if not weighed:
            return Decision(None, candidates)
        best = min(candidate.estimated_ttft_s for candidate in candidates)
        limit = best * (1 + TIE_SHARE) + self._settings.tie_s
        tied = [pair for pair in weighed if pair[1].estimated_ttft_s <= limit]
        chosen = min(tied, key=lambda pair: (pair[1].running, pair[1].estimated_ttft_s))[0]
        self.reservations.add(
            chosen.worker_id,
            Reservation(now, request.num_tokens, request.num_streams, request.tenant),
        )
        return Decision(chosen, candidates)

    def retry_after_s(self, request: Place, workers: list[Worker]) -> float:
        """See `Placer.retry_after_s`."""
        waits = [
            self.weigh(request, worker).estimated_ttft_s
            for worker in workers
            if worker.takes_streams
        ]
        return max(1.0, min(waits, default=1.0))

    def eligible(self, request: Place, workers: list[Worker]) -> list[Worker]:
        """Workers that are not to be left out; those only if there are no others.

        Who failed a while ago may be back, the last one to fail hardly. Even a sole worker that has
        just failed is asked: waiting for ever would be worse. Of those that remain, a request with
        a grammar prefers workers with room whose grammar libraries are loaded.
        """
        live = [worker for worker in workers if worker.takes_streams]
        fresh = [worker for worker in live if worker.worker_id not in request.exclude]
        others = [worker for worker in live if worker.worker_id not in request.exclude[:1]]
        found = fresh or others or live
        if not request.has_grammar:
            return found
        warm = [
            worker
            for worker in found
            if not worker.load.is_compiler_starting and self.has_room(request, worker)
        ]
        return warm or found

    def _streams(self, worker: Worker) -> int:
        self.reservations.settle(worker.worker_id, worker.beat_at)
        held = worker.load.running + worker.load.waiting
        return held + self.reservations.streams(worker.worker_id)

    def has_room(self, request: Place, worker: Worker) -> bool:
        """An idle worker always has room, also for an n above its capacity: it queues the rest."""
        held = self._streams(worker)
        return held == 0 or held + request.num_streams <= self.room(request, worker)

    def room(self, request: Place, worker: Worker) -> int:
        """Streams that the worker may hold with this request. A tenant below its share of it goes
        past those who wait there: the engine gives it rows of tenants above theirs."""
        load = worker.load
        room = capacity(load, self._settings)
        own = load.tenant_streams.get(request.tenant, 0)
        own += self.reservations.streams_of(worker.worker_id, request.tenant)
        own += request.num_streams
        if is_within_share(load, request.tenant, request.weight, own):
            room += load.max_num_seqs
        return room

    def weigh(self, request: Place, worker: Worker) -> Candidate:
        """A worker as the request sees it, by beats alone."""
        return Candidate(
            worker_id=worker.worker_id,
            estimated_ttft_s=estimated_ttft_s(
                worker.load,
                self._settings,
                uncached_tokens=request.num_tokens,
                reserved_tokens=self.reservations.tokens(worker.worker_id),
            ),
            running=self._streams(worker),
            kv_usage=kv_usage(worker.load),
        )
