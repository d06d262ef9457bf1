"""IndexedPlacement: by the prefix index while Redis answers, by load alone during an outage.

Reservations in Redis that are not a scheduler's are deleted, so that placement by the index can
continue. Workers then look a little less busy until the streams placed meanwhile have their first
token.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from typing import Final

from tokenmesh.services.scheduler_svc.index.placement_index import (
    COMPUTES,
    HOLDS,
    TAKES,
    TAKES_AND_HOLDS,
    CandidateLoad,
    CandidateScore,
    PlacementIndex,
)
from tokenmesh.services.scheduler_svc.placement import (
    KV_COMPUTED,
    KV_HELD,
    Decision,
    LoadPlacement,
    Reservation,
    Worker,
    extra_s,
    kv_usage,
    prefill_rate,
    scope_numbers,
    sources_of,
)
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.placement import PrefixIndexSettings, SchedulerSettings
from tokenmesh.shared.errors import TokenMeshError, Unavailable
from tokenmesh.shared.ids import ModelName, WorkerId, new_reservation
from tokenmesh.shared.messages.place import Candidate, KvOrigin, Place
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.prefix_index import IndexKeys, name_reservation
from tokenmesh.shared.recent_most import RecentMost

logger = logging.getLogger(__name__)

PREFIX: Final = "prefix"
"""No other worker holds more of the prompt."""
COST: Final = "cost"
"""Another worker holds more of it, and would still take longer."""
LOAD: Final = "load"
"""No worker holds any of it."""

_USUAL_ANSWERS: Final = 4.0
"""A lookup may take so many times as long as the slowest recent one: the machine may be busy."""
_MOST_PATIENCE: Final = 5.0
"""In multiples of `prefix_index.lookup_timeout_s`."""

_MAX_TOKENS: Final = 1 << 34
"""A worker has 4,096 streams at most; so many of 4 million tokens each reserve no more."""
_MAX_STREAMS: Final = 1 << 18
"""64 times the most streams of a worker: waiting ones are reserved, too."""
_ESTIMATES: Final = "placement_candidate_seconds"


class IndexedPlacement:
    """Implements `Placer`. Schedulers see each other's reservations in the index."""

    def __init__(
        self,
        settings: SchedulerSettings,
        index_settings: PrefixIndexSettings,
        index: PlacementIndex,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._index_settings = index_settings
        self._index = index
        self._metrics = metrics
        self._by_load = LoadPlacement(settings)
        self._retry_at_s = 0.0
        self._answers = RecentMost()
        self._was_late = False
        self._is_away = False
        self._decisions = DecisionMetrics(metrics, index_settings.sample_every)
        self._repairs = metrics.counter("prefix_index_mends")
        metrics.gauge_of("prefix_index_away", lambda: self._is_away)

    async def place(self, request: Place, workers: list[Worker], now: float) -> Decision:
        decision = await self._decide(request, workers, now)
        self._decisions.record(request, decision, workers)
        return decision

    def retry_after_s(self, request: Place, workers: list[Worker]) -> float:
        return self._by_load.retry_after_s(request, workers)

    async def _decide(self, request: Place, workers: list[Worker], now: float) -> Decision:
        eligible = self._by_load.eligible(request, workers)
        if not eligible or monotonic_s() < self._retry_at_s:
            return await self._by_load.place(request, workers, now)
        name = new_reservation()
        # Redis knows of more streams than heartbeats do, never of fewer.
        if not any(self._by_load.has_room(request, worker) for worker in eligible):
            return Decision(None, [])
        compared, loads = self._compared(request, workers, eligible)
        try:
            chosen, scores = await self._look_up(request, loads, name)
        except (TokenMeshError, TimeoutError) as error:
            self._note_outage(error)
            if isinstance(error, TokenMeshError) and not isinstance(error, Unavailable):
                # Redis has answered: the keys hold something that a scheduler did not write.
                await self._repair(request.model, loads)
            return await self._by_load.place(request, workers, now)
        self._note_recovery()
        if _is_corrupted(scores):
            await self._repair(request.model, loads)
            return await self._by_load.place(request, workers, now)
        candidates = [
            self._candidate(load, score, worker)
            for worker, load, score in zip(compared, loads, scores, strict=True)
            if score.has_room
        ]
        if chosen is None:
            return Decision(None, candidates)
        worker, source = compared[chosen], scores[chosen].source
        reservation = name_reservation(name, worker.worker_id, worker.epoch)
        if source:
            number = abs(source) - 1
            kv = self._source(request, compared[number], scores[number], now, computes=source < 0)
            own = Reservation(now, 1, request.num_streams, request.tenant)
            self._by_load.reservations.add(worker.worker_id, own)
            reason = KV_COMPUTED if kv.computes else KV_HELD
            return Decision(worker, candidates, reason, reservation, kv)
        uncached = request.num_tokens - scores[chosen].matched_blocks * self._index.block_tokens
        self._by_load.reservations.add(
            worker.worker_id,
            Reservation(now, max(1, uncached), request.num_streams, request.tenant),
        )
        return Decision(worker, candidates, _reason(scores, chosen), reservation)

    def _compared(
        self, request: Place, workers: list[Worker], takers: list[Worker]
    ) -> tuple[list[Worker], list[CandidateLoad]]:
        """The workers that may take streams, and those whose KV they may read."""
        sources = sources_of(request, workers, takers)
        if not sources:
            return takers, [self._load(request, worker) for worker in takers]
        ids, numbers = {worker.worker_id for worker in takers}, scope_numbers(sources)
        compared = takers + [each for each in sources if each.worker_id not in ids]
        weight = self._settings.uncached_weight
        return compared, [
            _with_kv(self._load(request, each), each, numbers, ids, sources, weight)
            for each in compared
        ]

    def _source(
        self, request: Place, worker: Worker, score: CandidateScore, now: float, *, computes: bool
    ) -> KvOrigin:
        """Name a source. The tokens that it computes are counted until its heartbeat does."""
        if computes:
            uncached = request.num_tokens - score.matched_blocks * self._index.block_tokens
            placed = Reservation(now, max(1, uncached), 1, request.tenant)
            self._by_load.reservations.add(worker.worker_id, placed)
        return KvOrigin(worker_id=worker.worker_id, epoch=worker.epoch, computes=computes)

    async def _look_up(
        self, request: Place, loads: list[CandidateLoad], name: str
    ) -> tuple[int | None, list[CandidateScore]]:
        began_s, limit_s = monotonic_s(), self._index_settings.lookup_timeout_s
        usual_s = _USUAL_ANSWERS * self._answers.at(began_s)
        try:
            async with asyncio.timeout(min(max(limit_s, usual_s), _MOST_PATIENCE * limit_s)):
                return await self._index.place(request, loads, name)
        finally:
            now = monotonic_s()
            self._answers.note(now, now - began_s)

    def _load(self, request: Place, worker: Worker) -> CandidateLoad:
        load, recent = worker.load, self._by_load.reservations
        recent.settle(worker.worker_id, worker.beat_at)
        queued = load.queued_tokens
        if not load.is_indexed or worker.computes_for_others:
            queued += recent.tokens(worker.worker_id)
        return CandidateLoad(
            worker_id=worker.worker_id,
            epoch=worker.epoch,
            prefill_tokens_per_s=prefill_rate(load, self._settings),
            queued_tokens=queued,
            extra_s=extra_s(load, self._settings),
            num_started=max(0, load.running + load.waiting - load.starting),
            num_starting=load.starting + recent.streams(worker.worker_id),
            num_room=self._by_load.room(request, worker),
            is_indexed=load.is_indexed,
        )

    def _candidate(self, load: CandidateLoad, score: CandidateScore, worker: Worker) -> Candidate:
        return Candidate(
            worker_id=worker.worker_id,
            estimated_ttft_s=score.estimated_ttft_s,
            cost_s=score.cost_s,
            running=load.num_started + max(load.num_starting, score.reserved_streams),
            kv_usage=kv_usage(worker.load),
            matched_tokens=score.matched_blocks * self._index.block_tokens,
            reserved_tokens=score.reserved_tokens,
        )

    async def _repair(self, model: ModelName, loads: Sequence[CandidateLoad]) -> None:
        """Delete all reservations of a model; raises nothing."""
        self._repairs.inc()
        keys = IndexKeys(model)
        names = [keys.reserved(load.worker_id, load.epoch) for load in loads]
        try:
            await self._index.redis.call("DEL", *names)
        except TokenMeshError as error:
            logger.info("cannot delete corrupted reservations from the prefix index: %s", error)

    def _note_outage(self, error: Exception) -> None:
        self._retry_at_s = monotonic_s() + self._index_settings.retry_s
        self._metrics.counter("prefix_index_failures").inc()
        # after one late answer the next lookup is given more time
        is_outage = self._was_late or not isinstance(error, TimeoutError)
        self._was_late = True
        if is_outage and not self._is_away:
            reason = str(error) or "the prefix index did not answer in time"
            logger.warning("placing by load alone: %s", reason)
            self._is_away = True

    def _note_recovery(self) -> None:
        if self._is_away:
            logger.info("placing by the prefix index again")
        self._is_away = self._was_late = False


def _with_kv(
    load: CandidateLoad,
    worker: Worker,
    numbers: Mapping[bytes, int],
    takers: Collection[WorkerId],
    sources: Collection[Worker],
    weight: float,
) -> CandidateLoad:
    takes, holds = worker.worker_id in takers, worker in sources
    use = TAKES_AND_HOLDS if takes and holds else TAKES if takes else HOLDS
    if not takes and worker.computes_for_others and not worker.draining:
        use = COMPUTES
    return load._replace(
        kv_tokens_per_s=worker.load.kv_tokens_per_s,
        kv_number=numbers.get(worker.kv_scope, 0),
        use=use,
        weight=weight if worker.kv_role == "decode" else 0.0,
    )


def _is_corrupted(scores: Sequence[CandidateScore]) -> bool:
    """Return whether a reservation is beyond what schedulers make, above or below zero."""
    return any(
        abs(score.reserved_tokens) > _MAX_TOKENS or abs(score.reserved_streams) > _MAX_STREAMS
        for score in scores
    )


def _reason(scores: list[CandidateScore], chosen: int) -> str:
    most = max(score.matched_blocks for score in scores)
    if not most:
        return LOAD
    return PREFIX if scores[chosen].matched_blocks == most else COST


class DecisionMetrics:
    """Counts every decision, and observes the estimates of one in `sample_every`."""

    def __init__(self, metrics: Metrics, sample_every: int) -> None:
        self._metrics = metrics
        self._sample_every = sample_every
        self._decisions = count()
        self._observed: dict[ModelName, set[WorkerId]] = {}

    def record(self, request: Place, decision: Decision, workers: Sequence[Worker]) -> None:
        """Count a placement on one of the `workers` of the model."""
        if decision.worker is None:
            return
        model = str(request.model)
        self._metrics.counter("placement_reasons", model_name=model, reason=decision.reason).inc()
        for each in decision.candidates:
            if each.worker_id == decision.worker.worker_id:
                matched = self._metrics.counter("placement_matched_tokens", model_name=model)
                matched.inc(each.matched_tokens)
        if next(self._decisions) % self._sample_every == 0:
            self._drop_dead(request.model, {each.worker_id for each in workers})
            self._observe(request.model, decision.candidates)

    def _observe(self, model: ModelName, candidates: Sequence[Candidate]) -> None:
        observed = self._observed.setdefault(model, set())
        for each in candidates:
            observed.add(each.worker_id)
            labels = {"model_name": str(model), "engine": str(each.worker_id)}
            self._metrics.histogram(_ESTIMATES, **labels).observe(each.estimated_ttft_s)

    def _drop_dead(self, model: ModelName, live: set[WorkerId]) -> None:
        """Remove the series of dead workers: a scheduler outlives many of them."""
        observed = self._observed.get(model, set())
        for worker in observed - live:
            self._metrics.forget(_ESTIMATES, model_name=str(model), engine=str(worker))
        observed &= live
