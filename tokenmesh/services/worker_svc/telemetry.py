"""Metrics of the engine and spans of streams, from step outputs.

Spans of a stream are recorded after its end: `worker.grammar` where one was compiled,
`worker.queue`, one `worker.prefill` for each chunk, `worker.decode` with its steps as events.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import zip_longest
from typing import Final

from tokenmesh.engine.core.outputs import EndedStream, StepOutput
from tokenmesh.engine.core.speculating import DraftTotals
from tokenmesh.engine.core.step_log import TimelineStep
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.timeline import Timeline
from tokenmesh.services.worker_svc.host_tier_metrics import HostTierMetrics
from tokenmesh.services.worker_svc.load import TOO_LONG, TOO_MANY, LoadBook
from tokenmesh.services.worker_svc.loaded import Loaded
from tokenmesh.shared.ids import ModelName, WorkerId
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.telemetry import REQUEST_ID, Event, record_span

_STEPS_CACHED: Final = 1024
_MAX_ADAPTERS: Final = 256
"""Names in metrics; later ones are counted together."""

_DRAFTS: Final = (
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
)
"""In the order of `DraftTotals`."""
_SLEEP_STATES: Final = ("awake", "weights_offloaded", "discard_all")
"""By level."""


class DraftMetrics:
    """The metrics of drafts, fed with counts that go on."""

    def __init__(self, metrics: Metrics, labels: dict[str, str], book: LoadBook) -> None:
        self._metrics, self.labels = metrics, labels
        self._counters = [metrics.counter(name, **labels) for name in _DRAFTS]
        self._shown = DraftTotals()
        metrics.gauge_of("spec_decode_index_bytes", lambda: book.stats.draft_bytes, **labels)

    def note(self, totals: DraftTotals) -> None:
        """Show the counts of now."""
        before, self._shown = self._shown, totals
        if totals is before:
            return
        for counter, now, then in zip(self._counters, totals[:3], before[:3], strict=True):
            counter.inc(now - then)
        places = zip_longest(totals.accepted_by_place, before.accepted_by_place, fillvalue=0)
        for place, (now, then) in enumerate(places):
            self._metrics.counter(
                "spec_decode_num_accepted_tokens_per_pos", **self.labels, position=str(place)
            ).inc(now - then)


class WorkerMetrics:
    """Gauges read the load book; counters and histograms are fed here."""

    def __init__(
        self, metrics: Metrics, model: ModelName, worker_id: WorkerId, book: LoadBook
    ) -> None:
        labels = {"model_name": str(model), "engine": str(worker_id)}
        self._metrics, self.labels = metrics, labels
        self._book = book
        self._num_preemptions = 0
        self._adapters: set[str] = set()
        """Names that metrics show."""
        self._prompt_tokens = metrics.counter("prompt_tokens", **labels)
        self._prompt_cached = metrics.counter("prompt_tokens_cached", **labels)
        self._prompt_recomputed = metrics.counter("prompt_tokens_recomputed", **labels)
        self._generated = metrics.counter("generation_tokens", **labels)
        self._queries = metrics.counter("prefix_cache_queries", **labels)
        self._hits = metrics.counter("prefix_cache_hits", **labels)
        by_source = partial(metrics.counter, "prompt_tokens_by_source", **labels)
        self._from_compute = by_source(source="local_compute")
        self._from_cache = by_source(source="local_cache_hit")
        self._cached_locally = metrics.counter(
            "prompt_tokens_cached_by_source", **labels, source="local_cache_hit"
        )
        self._host = None
        if book.images.slots:
            self._host = HostTierMetrics(metrics, labels, book, book.images)
        self._computed = metrics.histogram("request_prefill_kv_computed_tokens", **labels)
        self._stream_preemptions = metrics.histogram("request_num_preemptions", **labels)
        self._preemptions = metrics.counter("num_preemptions", **labels)
        self._drafts = DraftMetrics(metrics, labels, book)
        self._step_tokens = metrics.histogram("iteration_tokens_total", **labels)
        self._step_s = metrics.histogram("engine_step_seconds", **labels)
        self._queue_s = metrics.histogram("request_queue_time_seconds", **labels)
        self._prefill_s = metrics.histogram("request_prefill_time_seconds", **labels)
        self._decode_s = metrics.histogram("request_decode_time_seconds", **labels)
        self._inference_s = metrics.histogram("request_inference_time_seconds", **labels)
        rejections = {
            reason: metrics.counter("admission_rejections", model_name=str(model), reason=reason)
            for reason in (TOO_MANY, TOO_LONG)
        }
        book.on_refusal = lambda reason: rejections[reason].inc()
        metrics.gauge_of("num_requests_running", lambda: book.load().running, **labels)
        metrics.gauge_of("num_requests_waiting", lambda: book.load().waiting, **labels)
        waiting = partial(metrics.gauge, "num_requests_waiting_by_reason", **labels)
        waiting(reason="capacity").set_function(lambda: book.stats.waiting)
        waiting(reason="deferred").set_function(lambda: book.load().waiting - book.stats.waiting)
        metrics.gauge("cache_config_info", **labels, **book.cache_config).set(1)
        metrics.gauge_of("kv_cache_usage_perc", lambda: _kv_usage(book), **labels)
        for kind in ("blocks", "states"):
            read = partial(book.kv_bytes, of_rows=kind == "states")
            metrics.gauge_of("kv_cache_bytes", partial(read, in_use=False), **labels, kind=kind)
            metrics.gauge_of("kv_cache_used_bytes", partial(read, in_use=True), **labels, kind=kind)

    def show_format(self, weight_format: str) -> None:
        """Export how the model's weights are kept."""
        self._metrics.gauge("model_weights", **self.labels, format=weight_format).set(1)

    def watch_ranks(self, loaded: Loaded) -> None:
        """Export a worker's ranks, and where each has waited, read at each scrape."""
        count, stages = loaded.num_ranks, loaded.num_stages
        self._metrics.gauge("ranks", **self.labels).set(count)
        self._metrics.gauge("stages", **self.labels).set(stages)
        for rank in range(count if count > 1 else 0):
            labels = {**self.labels, "rank": str(rank)}
            self._metrics.gauge_of("rank_sum_seconds", partial(loaded.sum_seconds, rank), **labels)
            if stages > 1:
                read = partial(loaded.wait_seconds, rank)
                self._metrics.gauge_of("rank_wait_seconds", read, **labels)

    def watch_sleep(self, level_of: Callable[[], int]) -> None:
        """Export the sleep state; `level_of` is called at each scrape."""
        for level, state in enumerate(_SLEEP_STATES):
            read = partial(_is_at, level_of, level)
            self._metrics.gauge_of("engine_sleep_state", read, **self.labels, sleep_state=state)

    def note(self, output: StepOutput) -> None:
        if output.num_tokens:
            self._step_tokens.observe(output.num_tokens)
            self._step_s.observe(output.duration_s)
        self._preemptions.inc(output.stats.num_preemptions - self._num_preemptions)
        self._num_preemptions = output.stats.num_preemptions
        if self._host is not None:
            self._host.note(output.stats.host)
        self._drafts.note(output.stats.drafts)
        for ended in output.ended:
            self._note_ended(ended)

    def _note_ended(self, ended: EndedStream) -> None:
        request = ended.request
        timeline = request.timeline
        self._generated.inc(request.num_known - request.num_prompt - request.output.num_resumed)
        if request.spec.lora is not None:
            self._count_adapter(request.spec.lora.name)
        if request.place.num_cached is not None:
            self._prompt_tokens.inc(request.num_prompt)
            self._prompt_cached.inc(request.place.num_cached)
            if request.place.num_cached and request.place.num_cached + 1 == request.num_prompt:
                self._prompt_recomputed.inc()
            self._book.cached_tokens += request.place.num_cached
            self._queries.inc(request.num_prompt)
            from_pool = request.place.num_cached - request.place.num_filled
            self._hits.inc(from_pool)
            self._from_cache.inc(from_pool)
            self._cached_locally.inc(from_pool)
            if self._host is not None:
                self._host.note_ended(request)
            self._from_compute.inc(request.num_prompt - request.place.num_cached)
            self._computed.observe(request.num_prompt - request.place.num_cached)
            self._stream_preemptions.observe(request.place.num_preemptions)
        if timeline.first_scheduled_ns:
            self._queue_s.observe((timeline.first_scheduled_ns - timeline.arrived_ns) / 1e9)
        if timeline.first_token_ns:
            started_ns, first_ns = timeline.first_scheduled_ns, timeline.first_token_ns
            self._prefill_s.observe((first_ns - started_ns) / 1e9)
            if request.spec.pooling is None and not request.spec.computes_only:
                self._decode_s.observe((timeline.ended_ns - first_ns) / 1e9)
            self._inference_s.observe((timeline.ended_ns - started_ns) / 1e9)

    def _count_adapter(self, name: str) -> None:
        """Under its own name, as long as there are not too many of them."""
        if len(self._adapters) < _MAX_ADAPTERS:
            self._adapters.add(name)
        shown = name if name in self._adapters else "other"
        self._metrics.counter("lora_streams", **self.labels, adapter=shown).inc()


def _is_at(level_of: Callable[[], int], level: int) -> bool:
    return level_of() == level


def _kv_usage(book: LoadBook) -> float:
    load = book.load()
    return load.kv_blocks_used / max(1, load.kv_blocks_total)


GRAMMAR: Final = "worker.grammar"
QUEUE: Final = "worker.queue"
PREFILL: Final = "worker.prefill"
DECODE: Final = "worker.decode"

_SAMPLED: Final = frozenset("13579bdf")
"""Last digits of a traceparent whose lowest flag, `sampled`, is set."""


def sampled(traceparent: str | None) -> str | None:
    """The traceparent, if the trace is sampled."""
    return traceparent if traceparent and traceparent[-1] in _SAMPLED else None


def record_spans(ended: EndedStream) -> None:
    """Record everything that happened to the stream; nothing for an untraced one."""
    parent = ended.request.spec.traceparent
    if parent is None:
        return
    timeline = ended.request.timeline
    identity: dict[str, str | int] = {REQUEST_ID: ended.request.spec.request_id}
    if ended.request.spec.lora is not None:
        identity["adapter"] = ended.request.spec.lora.name
    queue_end_ns = timeline.first_scheduled_ns or timeline.ended_ns
    queue_start_ns = timeline.grammar_ns or timeline.arrived_ns
    if timeline.grammar_ns:
        record_span(GRAMMAR, timeline.arrived_ns, timeline.grammar_ns, parent, identity)
    record_span(QUEUE, queue_start_ns, queue_end_ns, parent, identity)
    for chunk, start in zip(timeline.chunks, _starts(timeline), strict=True):
        attributes: dict[str, str | int] = {
            **identity,
            "tokens": chunk.num_tokens,
            "cached_tokens": chunk.num_cached,
            **({"filled_tokens": chunk.num_filled} if chunk.num_filled else {}),
            "batch_size": chunk.batch_size,
        }
        if media := _merged(ended.request, start, start + chunk.num_tokens):
            attributes["media_tokens"] = media
        record_span(PREFILL, chunk.start_ns, chunk.end_ns, parent, attributes)
    draws = ended.request.spec.pooling is None and not ended.request.spec.computes_only
    if timeline.first_token_ns and draws:
        _record_decode(ended, parent)


def _starts(timeline: Timeline) -> Iterator[int]:
    """The first position that each chunk computes."""
    start, last_ns = 0, 0
    for chunk in timeline.chunks:
        if any(last_ns <= at_ns <= chunk.start_ns for at_ns in timeline.preempted_ns):
            start = 0
        start += chunk.num_cached
        yield start
        start, last_ns = start + chunk.num_tokens, chunk.start_ns


def _merged(request: Request, start: int, end: int) -> int:
    """Tokens at positions [start, end) that take embeddings of media."""
    runs = (run for item in request.spec.media for run in item.runs())
    return sum(max(0, min(end, last) - max(start, first)) for first, last in runs)


def _record_decode(ended: EndedStream, parent: str) -> None:
    request = ended.request
    timeline = request.timeline
    attributes: dict[str, str | int | float] = {
        REQUEST_ID: request.spec.request_id,
        "prompt_tokens": request.num_prompt,
        "output_tokens": request.num_known - request.num_prompt,
        "cached_tokens": request.place.num_cached or 0,
        "preemptions": request.place.num_preemptions,
        "finish_reason": ended.ending.reason,
    }
    if request.output.num_drafts:
        attributes["draft_tokens"] = request.output.num_drafts
        attributes["accepted_draft_tokens"] = request.output.num_accepted
        num_drawn = request.num_known - request.num_prompt - request.output.num_resumed
        num_steps = max(1, num_drawn - request.output.num_accepted)
        attributes["tokens_per_step"] = round(num_drawn / num_steps, 2)
    if request.spec.lora is not None:
        attributes["adapter"] = request.spec.lora.name
    events = [_step_event(step) for step in ended.steps]
    if timeline.preempted_ns:
        events += [Event("preempted", at_ns) for at_ns in timeline.preempted_ns]
        events.sort(key=lambda event: event.time_ns)
    record_span(
        DECODE, timeline.first_token_ns, timeline.ended_ns, parent, attributes, events=events
    )


@lru_cache(_STEPS_CACHED)
def _step_event(step: TimelineStep) -> Event:
    """The same for every stream that was in the step's batch, so that it is encoded once."""
    facts = {"batch_size": step.batch_size, "tokens": step.num_tokens, "kv_used": step.kv_used}
    return Event("step", step.end_ns, facts)
