"""DecisionMetrics: what placements by the index were made from, for Prometheus."""

from collections.abc import Sequence
from itertools import count
from typing import Final

from tokenmesh.services.scheduler_svc.placement import Decision, Worker
from tokenmesh.shared.ids import ModelName, WorkerId
from tokenmesh.shared.messages.place import Candidate, Place
from tokenmesh.shared.metrics import Metrics

_ESTIMATES: Final = "placement_candidate_seconds"


class DecisionMetrics:
    """Every decision counts; the estimates of one in `sample_every` are observed."""

    def __init__(self, metrics: Metrics, sample_every: int) -> None:
        self._metrics = metrics
        self._sample_every = sample_every
        self._decisions = count()
        self._observed: dict[ModelName, set[WorkerId]] = {}

    def note(self, request: Place, decision: Decision, workers: Sequence[Worker]) -> None:
        """A placement on one of the `workers` of the model."""
        if decision.worker is None:
            return
        model = str(request.model)
        self._metrics.counter("placement_reasons", model_name=model, reason=decision.reason).inc()
        for each in decision.candidates:
            if each.worker_id == decision.worker.worker_id:
                matched = self._metrics.counter("placement_matched_tokens", model_name=model)
                matched.inc(each.matched_tokens)
        if next(self._decisions) % self._sample_every == 0:
            self._forget_gone(request.model, {each.worker_id for each in workers})
            self._observe(request.model, decision.candidates)

    def _observe(self, model: ModelName, candidates: Sequence[Candidate]) -> None:
        observed = self._observed.setdefault(model, set())
        for each in candidates:
            observed.add(each.worker_id)
            labels = {"model_name": str(model), "engine": str(each.worker_id)}
            self._metrics.histogram(_ESTIMATES, **labels).observe(each.estimated_ttft_s)

    def _forget_gone(self, model: ModelName, live: set[WorkerId]) -> None:
        """Workers come and go for as long as a scheduler lives."""
        observed = self._observed.get(model, set())
        for worker in observed - live:
            self._metrics.forget(_ESTIMATES, model_name=str(model), engine=str(worker))
        observed &= live
