"""Meters: what a client's request took, in Prometheus' terms.

Metric objects are looked up once for each model and worker: a lookup by labels costs more than
what is measured.
"""

from collections import OrderedDict
from typing import Final

from tokenmesh.services.gateway.generation.choice import Choice
from tokenmesh.services.gateway.generation.delivery import Delivery
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.metrics import Metrics

_MAX_KEPT: Final = 256
"""Pairs of model and worker whose metric objects are kept at hand."""


class _Series:
    """The metric objects of one model on one worker."""

    def __init__(self, metrics: Metrics, model: str, engine: str) -> None:
        labels = {"model_name": model, "engine": engine}
        self._metrics = metrics
        self._labels = labels
        self.first_token = metrics.histogram("time_to_first_token_seconds", **labels)
        self.next_token = metrics.histogram("inter_token_latency_seconds", **labels)
        self.mean_token = metrics.histogram("request_time_per_output_token_seconds", **labels)
        self.whole = metrics.histogram("e2e_request_latency_seconds", **labels)
        self.prompt_tokens = metrics.histogram("request_prompt_tokens", **labels)
        self.generated_tokens = metrics.histogram("request_generation_tokens", **labels)
        self.longest = metrics.histogram("request_max_num_generation_tokens", **labels)
        self.max_tokens = metrics.histogram("request_params_max_tokens", **labels)
        self.n = metrics.histogram("request_params_n", **labels)

    def count_success(self, reason: str) -> None:
        """A choice has ended."""
        self._metrics.counter("request_success", finished_reason=reason, **self._labels).inc()


class Meters:
    """Of one gateway process."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._series: OrderedDict[tuple[str, str], _Series] = OrderedDict()

    def start(self, model: str, started_s: float) -> "Meter":
        """Begin to measure a request that arrived at `started_s` (monotonic)."""
        return Meter(self, model, started_s)

    def series(self, model: str, engine: str) -> _Series:
        """The metric objects of a model on a worker."""
        found = self._series.get((model, engine))
        if found is None:
            found = self._series[model, engine] = _Series(self._metrics, model, engine)
            if len(self._series) > _MAX_KEPT:
                self._series.popitem(last=False)
        return found


class Meter:
    """One request."""

    def __init__(self, meters: Meters, model: str, started_s: float) -> None:
        self._meters = meters
        self._model = model
        self._started_s = started_s
        self._first_s: float | None = None
        self._last_s = 0.0
        self._series: _Series | None = None

    def flush(self, delivery: Delivery) -> None:
        """Tokens are about to be sent."""
        now = monotonic_s()
        if self._first_s is None or self._series is None:
            self._first_s = now
            engine = delivery.prompts[0].worker_id or ""
            self._series = self._meters.series(self._model, engine)
            self._series.first_token.observe(now - self._started_s)
        else:
            self._series.next_token.observe(now - self._last_s)
        self._last_s = now

    def finish(self, delivery: Delivery, n: int) -> None:
        """The last byte was sent."""
        series, first_s = self._series, self._first_s
        if series is None or first_s is None:
            return
        series.whole.observe(monotonic_s() - self._started_s)
        series.n.observe(n)
        for prompt in delivery.prompts:
            series.prompt_tokens.observe(prompt.num_tokens)
            series.max_tokens.observe(prompt.max_tokens)
        series.longest.observe(max(choice.num_tokens for choice in delivery.choices))
        for choice in delivery.choices:
            self._finish_choice(series, choice, self._last_s - first_s)

    def _finish_choice(self, series: _Series, choice: Choice, decode_s: float) -> None:
        series.generated_tokens.observe(choice.num_tokens)
        series.count_success(choice.finish_reason or "abort")
        if choice.num_tokens > 1:
            series.mean_token.observe(decode_s / (choice.num_tokens - 1))
