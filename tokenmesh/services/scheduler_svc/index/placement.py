"""IndexedPlacement: by the prefix index while Redis answers, by load alone while it does not."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from tokenmesh.services.scheduler_svc.cost import extra_s, kv_usage
from tokenmesh.services.scheduler_svc.index.decision_metrics import DecisionMetrics
from tokenmesh.services.scheduler_svc.index.index import Bid, PlacementIndex, Weighed
from tokenmesh.services.scheduler_svc.index.mending import Mender, is_absurd, is_refusal
from tokenmesh.services.scheduler_svc.placement import TIE_SHARE, Decision, Placement, Worker
from tokenmesh.services.scheduler_svc.reservations import Reservation
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.placement import PrefixIndexSettings, SchedulerSettings
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.ids import new_reservation
from tokenmesh.shared.messages.place import Candidate, Place
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.prefix_index import name_reservation

logger = logging.getLogger(__name__)

PREFIX: Final = "prefix"
"""No other worker has more of the prompt."""
COST: Final = "cost"
"""Another one has more of it, and would take longer all the same."""
LOAD: Final = "load"
"""Nobody has any of it."""


class IndexedPlacement:
    """Implements `Placer`. Any number of schedulers see each other's reservations in the index."""

    def __init__(
        self,
        settings: SchedulerSettings,
        limits: PrefixIndexSettings,
        index: PlacementIndex,
        metrics: Metrics,
        clock: Callable[[], float] = monotonic_s,
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._index = index
        self._mender = Mender(index.redis, metrics)
        self._metrics = metrics
        self._clock = clock
        self._by_load = Placement(settings)
        self._away_until_s = 0.0
        self._is_away = False
        self._decisions = DecisionMetrics(metrics, limits.sample_every)
        metrics.gauge_of("prefix_index_away", lambda: self._is_away)

    async def place(self, request: Place, workers: list[Worker], now: float) -> Decision:
        """See `Placer.place`."""
        decision = await self._decide(request, workers, now)
        self._decisions.note(request, decision, workers)
        return decision

    def retry_after_s(self, request: Place, workers: list[Worker]) -> float:
        """See `Placer.retry_after_s`."""
        return self._by_load.retry_after_s(request, workers)

    async def _decide(self, request: Place, workers: list[Worker], now: float) -> Decision:
        eligible = self._by_load.eligible(request, workers)
        if not eligible or self._clock() < self._away_until_s:
            return await self._by_load.place(request, workers, now)
        field = new_reservation()
        # Redis knows of more streams than beats do, never of fewer.
        if not any(self._by_load.has_room(request, worker) for worker in eligible):
            return Decision(None, [])
        bids = [self._bid(request, worker) for worker in eligible]
        try:
            async with asyncio.timeout(self._limits.lookup_timeout_s):
                chosen, weighed = await self._index.place(
                    request,
                    bids,
                    field,
                    tie_share=TIE_SHARE,
                    tie_s=self._settings.tie_s,
                    uncached_weight=self._settings.uncached_weight,
                )
        except (TokenMeshError, TimeoutError) as error:
            self._note_away(error)
            if is_refusal(error):
                await self._mender.mend(request.model, bids)
            return await self._by_load.place(request, workers, now)
        self._note_back()
        if is_absurd(weighed):
            await self._mender.mend(request.model, bids)
            return await self._by_load.place(request, workers, now)
        pairs = zip(eligible, weighed, strict=True)
        candidates = [
            self._candidate(request, worker, each) for worker, each in pairs if each.has_room
        ]
        if chosen is None:
            return Decision(None, candidates)
        worker = eligible[chosen]
        uncached = request.num_tokens - weighed[chosen].matched_blocks * self._index.block_tokens
        self._by_load.reservations.add(
            worker.worker_id,
            Reservation(now, max(1, uncached), request.num_streams, request.tenant),
        )
        reservation = name_reservation(field, worker.worker_id, worker.epoch)
        return Decision(worker, candidates, _reason(weighed, chosen), reservation)

    def _bid(self, request: Place, worker: Worker) -> Bid:
        load, recent = worker.load, self._by_load.reservations
        recent.settle(worker.worker_id, worker.beat_at)
        queued = load.queued_tokens
        if not load.is_indexed:
            queued += recent.tokens(worker.worker_id)
        rate = load.prefill_tokens_per_s or self._settings.assumed_prefill_tokens_per_s
        return Bid(
            worker_id=worker.worker_id,
            epoch=worker.epoch,
            prefill_tokens_per_s=rate,
            queued_tokens=queued,
            extra_s=extra_s(load, self._settings),
            num_started=max(0, load.running + load.waiting - load.starting),
            num_starting=load.starting + recent.streams(worker.worker_id),
            num_room=self._by_load.room(request, worker),
            is_indexed=load.is_indexed,
        )

    def _candidate(self, request: Place, worker: Worker, weighed: Weighed) -> Candidate:
        bid = self._bid(request, worker)
        return Candidate(
            worker_id=worker.worker_id,
            estimated_ttft_s=weighed.estimated_ttft_s,
            cost_s=weighed.cost_s,
            running=bid.num_started + max(bid.num_starting, weighed.reserved_streams),
            kv_usage=kv_usage(worker.load),
            matched_tokens=weighed.matched_blocks * self._index.block_tokens,
            reserved_tokens=weighed.reserved_tokens,
        )

    def _note_away(self, error: Exception) -> None:
        self._away_until_s = self._clock() + self._limits.retry_s
        self._metrics.counter("prefix_index_failures").inc()
        if not self._is_away:
            logger.warning("placing by load alone: %s", str(error) or "the index takes too long")
        self._is_away = True

    def _note_back(self) -> None:
        if self._is_away:
            logger.info("placing by the prefix index again")
        self._is_away = False


def _reason(weighed: list[Weighed], chosen: int) -> str:
    most = max(each.matched_blocks for each in weighed)
    if not most:
        return LOAD
    return PREFIX if weighed[chosen].matched_blocks == most else COST
