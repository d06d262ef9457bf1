"""Placement by load: the worker with the smallest estimated time to first token.

Each worker measures and publishes its own rates, so a slow one is chosen less often. No I/O and no
clock: everything that varies is an argument, so that a test can replay a decision.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from tokenmesh.shared.config.placement import SchedulerSettings
from tokenmesh.shared.ids import WorkerId
from tokenmesh.shared.messages.adapters import AdapterCard
from tokenmesh.shared.messages.beat import Heartbeat, WorkerLoad
from tokenmesh.shared.messages.place import Candidate, KvOrigin, Place
from tokenmesh.shared.tenant_share import is_within_share

WORKER_QUEUE_SHARE: Final = 0.25
"""Streams a worker may hold beyond max_num_seqs, as a share of max_num_seqs."""
RESERVATION_SETTLE_S: Final = 0.03
"""A heartbeat received this long after a placement already counts the request."""

TIE_SHARE: Final = 0.1
"""Estimates are not exact to a tenth: between such workers the number of streams decides."""
KV_COMPUTED: Final = "prefill elsewhere"
"""Another worker computes the prompt."""
KV_HELD: Final = "kv elsewhere"
"""Another worker has more of it, which the chosen one reads."""
ASSUMED_LOCAL_TOKENS: Final = 512
"""Prompts up to this length are computed where they are decoded, if only heartbeats are known."""
INDEX_AWAY: Final = "index away"
"""The reason of a decision that knew only heartbeats."""
_MAX_KV_USAGE: Final = 0.999  # keeps k/(1-k) finite when the pool is full
_FORGET_S: Final = 60.0
"""A worker without a heartbeat for so long is dead, and its reservations are dropped."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A live worker of the request's model, as of its last heartbeat."""

    worker_id: WorkerId
    epoch: int
    load: WorkerLoad
    draining: bool
    beat_at: float
    """When that heartbeat was received, monotonic seconds."""
    adapters: Sequence[AdapterCard] = ()
    kv_role: str = ""
    """See `ModelCard`."""
    kv_scope: bytes = b""

    def adapter(self, request: Place) -> AdapterCard | None:
        """The adapter that a request needs, if the worker serves it."""
        found = (each for each in self.adapters if each.name == request.lora)
        return next((each for each in found if request.lora_hash in ("", each.content_hash)), None)

    @property
    def computes_for_others(self) -> bool:
        return self.kv_role == "prefill"

    @property
    def accepts_streams(self) -> bool:
        """True where it is neither draining nor asleep."""
        return not self.draining and self.load.sleep_level == 0


def worker_from_beat(beat: Heartbeat, beat_at: float) -> Worker | None:
    """None for a heartbeat of another service."""
    if beat.load is None:
        return None
    own = (WorkerId(beat.instance_id), beat.epoch, beat.load, beat.draining, beat_at)
    if not beat.models:
        return Worker(*own)
    card = beat.models[0]
    return Worker(*own, card.adapters, card.kv_role, card.kv_scope)


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen worker (None: all are full) and the candidates that were compared."""

    worker: Worker | None
    candidates: list[Candidate]
    reason: str = INDEX_AWAY
    reservation: str = ""
    kv: KvOrigin | None = None
    """Where the worker gets KV."""


class Placer(Protocol):
    async def place(self, request: Place, workers: list[Worker], now: float) -> Decision:
        """Choose a worker and reserve on it. Does not raise."""

    def retry_after_s(self, request: Place, workers: list[Worker]) -> float:
        """Seconds that the least loaded worker needs for its current load; at least 1."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A placement that is not in the worker's heartbeat yet."""

    placed_at: float
    tokens: int
    streams: int
    tenant: str = ""


class Reservations:
    """The reservations of each worker. Times are monotonic seconds."""

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._by_worker: dict[WorkerId, deque[Reservation]] = {}

    def add(self, worker: WorkerId, reservation: Reservation) -> None:
        if worker not in self._by_worker:
            self._drop_dead(reservation.placed_at - _FORGET_S)
            self._by_worker[worker] = deque()
        self._by_worker[worker].append(reservation)

    def settle(self, worker: WorkerId, beat_at: float) -> None:
        """Drop what a heartbeat received at `beat_at` already counts."""
        pending = self._by_worker.get(worker)
        while pending and pending[0].placed_at + self._settle_s <= beat_at:
            pending.popleft()
        if not pending:
            self._by_worker.pop(worker, None)

    def tokens(self, worker: WorkerId) -> int:
        return sum(entry.tokens for entry in self._by_worker.get(worker, ()))

    def streams(self, worker: WorkerId, tenant: str | None = None) -> int:
        """Reserved streams, of all tenants or of one."""
        entries = self._by_worker.get(worker, ())
        return sum(entry.streams for entry in entries if tenant in (None, entry.tenant))

    def _drop_dead(self, before: float) -> None:
        dead = [name for name, entries in self._by_worker.items() if entries[-1].placed_at < before]
        for worker in dead:
            del self._by_worker[worker]


def kv_usage(load: WorkerLoad) -> float:
    """Share of the worker's KV blocks in use, in [0, 1]."""
    return min(1.0, max(0.0, load.kv_blocks_used / max(1, load.kv_blocks_total)))


def prefill_rate(load: WorkerLoad, settings: SchedulerSettings) -> float:
    """Prompt tokens that the worker computes in a second."""
    return load.prefill_tokens_per_s or settings.assumed_prefill_tokens_per_s


def extra_s(load: WorkerLoad, settings: SchedulerSettings) -> float:
    """Seconds on top of prefill: a penalty for a full KV pool, and the step in progress."""
    usage = min(kv_usage(load), _MAX_KV_USAGE)
    return settings.kv_pressure_s * usage / (1.0 - usage) + load.step_s


def capacity(load: WorkerLoad) -> int:
    """Streams, running and waiting, that the worker may hold before requests wait here."""
    slack = int(load.max_num_seqs * WORKER_QUEUE_SHARE)
    return load.max_num_seqs + slack


def sources_of(request: Place, workers: Sequence[Worker], takers: Sequence[Worker]) -> list[Worker]:
    """The workers whose KV others may read, where one of the takers can; draining ones included."""
    scopes = {worker.kv_scope for worker in takers if worker.load.kv_tokens_per_s}
    if not any(scopes):
        return []
    return [
        worker
        for worker in workers
        if worker.kv_scope
        and worker.kv_scope in scopes
        and worker.load.sleep_level == 0
        and worker.worker_id not in request.exclude
        and (request.lora is None or worker.adapter(request) is not None)
    ]


def scope_numbers(workers: Sequence[Worker]) -> dict[bytes, int]:
    """A number for each scope, from 1."""
    scopes = dict.fromkeys(worker.kv_scope for worker in workers)
    return {scope: number for number, scope in enumerate(scopes, start=1)}


class LoadPlacement:
    """Compares workers by their load and by the reservations since their last heartbeat."""

    def __init__(self, settings: SchedulerSettings, reason: str = INDEX_AWAY) -> None:
        self._settings = settings
        self._reason = reason
        self.reservations = Reservations(RESERVATION_SETTLE_S)

    async def place(self, request: Place, workers: list[Worker], now: float) -> Decision:
        weighed = [
            (worker, self.weigh(request, worker))
            for worker in self.eligible(request, workers)
            if self.has_room(request, worker)
        ]
        candidates = [candidate for _, candidate in weighed]
        if not weighed:
            return Decision(None, candidates)
        chosen = self.choose(request, weighed)
        self.reservations.add(
            chosen.worker_id,
            Reservation(now, request.num_tokens, request.num_streams, request.tenant),
        )
        kv = self._pair(request, workers, chosen, now)
        return Decision(chosen, candidates, self._reason, kv=kv)

    def _pair(
        self, request: Place, workers: Sequence[Worker], chosen: Worker, now: float
    ) -> KvOrigin | None:
        """The least busy worker that computes for others, for a prompt that is not short."""
        if request.num_tokens <= ASSUMED_LOCAL_TOKENS or not chosen.load.kv_tokens_per_s:
            return None
        found = [
            (self.weigh(request, each).estimated_ttft_s, each.worker_id, each)
            for each in sources_of(request, workers, [chosen])
            if each.computes_for_others and not each.draining and each.kv_scope == chosen.kv_scope
        ]
        if not found or chosen.computes_for_others:
            return None
        source = min(found)[2]
        placed = Reservation(now, request.num_tokens, 1, request.tenant)
        self.reservations.add(source.worker_id, placed)
        return KvOrigin(worker_id=source.worker_id, epoch=source.epoch, computes=True)

    def choose(self, _request: Place, weighed: list[tuple[Worker, Candidate]]) -> Worker:
        """The best of the workers with room; of about equal ones that with the fewest streams."""
        best = min(candidate.estimated_ttft_s for _, candidate in weighed)
        limit = best * (1 + TIE_SHARE) + self._settings.tie_s
        tied = [pair for pair in weighed if pair[1].estimated_ttft_s <= limit]
        return min(tied, key=lambda pair: (pair[1].running, pair[1].estimated_ttft_s))[0]

    def retry_after_s(self, request: Place, workers: list[Worker]) -> float:
        waits = [
            self.weigh(request, worker).estimated_ttft_s
            for worker in workers
            if worker.accepts_streams
        ]
        return max(1.0, min(waits, default=1.0))

    def eligible(self, request: Place, workers: list[Worker]) -> list[Worker]:
        """The workers not in `request.exclude`, unless there are no others.

        A worker that failed a while ago may have recovered, the one that failed last probably has
        not. A sole worker is eligible even just after a failure. For a request with a grammar, the
        workers with room whose grammar libraries are loaded are preferred. Only workers that serve
        the request's adapter count; of those with room, ones that have it in memory are preferred.
        """
        live = [worker for worker in workers if worker.accepts_streams]
        # those that compute for others take streams only where nothing else lives
        live = [worker for worker in live if not worker.computes_for_others] or live
        if request.lora is not None:
            live = self._with_adapter(request, live)
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

    def _with_adapter(self, request: Place, workers: list[Worker]) -> list[Worker]:
        found = [(worker, worker.adapter(request)) for worker in workers]
        serving = [(worker, adapter) for worker, adapter in found if adapter is not None]
        at_hand = [
            worker
            for worker, adapter in serving
            if adapter.is_in_memory
            and worker.worker_id not in request.exclude
            and self.has_room(request, worker)
        ]
        return at_hand or [worker for worker, _ in serving]

    def _streams(self, worker: Worker) -> int:
        self.reservations.settle(worker.worker_id, worker.beat_at)
        held = worker.load.running + worker.load.waiting
        return held + self.reservations.streams(worker.worker_id)

    def has_room(self, request: Place, worker: Worker) -> bool:
        """An idle worker always has room, even for an `n` above its capacity (the rest queues)."""
        held = self._streams(worker)
        return held == 0 or held + request.num_streams <= self.room(request, worker)

    def room(self, request: Place, worker: Worker) -> int:
        """Streams that the worker may hold with this request.

        More for a tenant below its share of the worker: the engine gives it rows of tenants that
        are above theirs.
        """
        load = worker.load
        room = capacity(load)
        own = load.tenant_streams.get(request.tenant, 0)
        own += self.reservations.streams(worker.worker_id, request.tenant)
        own += request.num_streams
        if is_within_share(load, request.tenant, request.weight, own):
            room += load.max_num_seqs
        return room

    def weigh(self, request: Place, worker: Worker) -> Candidate:
        """The estimate for a worker from its heartbeat: no prefix hit is assumed."""
        load = worker.load
        tokens = load.queued_tokens + self.reservations.tokens(worker.worker_id)
        tokens += request.num_tokens
        estimate_s = tokens / prefill_rate(load, self._settings) + extra_s(load, self._settings)
        return Candidate(
            worker_id=worker.worker_id,
            estimated_ttft_s=estimate_s,
            running=self._streams(worker),
            kv_usage=kv_usage(load),
        )
