"""Finished spans leave the process: to the bus, and to an OTLP collector where one is configured.

A span ends on any thread and only enters a queue there; encoding and sending happen on the event
loop, a batch at a time. Nothing waits for telemetry: what does not fit is dropped and counted.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import tokenmesh
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.config.mesh import TelemetrySettings
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.ids import InstanceId
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.telemetry.otlp import encode_request, encode_resource
from tokenmesh.shared.telemetry.recorder import (
    Attributes,
    RecordedSpan,
    Recorder,
    install_recorder,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

logger = logging.getLogger(__name__)

_TRACES_PATH: Final = "/v1/traces"


class BusExporter:
    """Queues the spans of one process and publishes them."""

    def __init__(
        self,
        service: str,
        resource: Attributes,
        settings: TelemetrySettings,
        bus: Bus,
        metrics: Metrics,
    ) -> None:
        self._subject = subjects.spans(service)
        self._resource = encode_resource(resource)
        self._settings = settings
        self._bus = bus
        self._queue: deque[RecordedSpan] = deque()
        self._sent = metrics.counter("spans_sent")
        self._dropped = metrics.counter("spans_dropped")
        self.num_sent = 0
        self.num_dropped = 0
        """Spans that found the queue full, were too large, or could not be sent."""

    def put(self, span: RecordedSpan) -> None:
        """Queue a span; from any thread."""
        if len(self._queue) >= self._settings.max_queued_spans:
            self._drop(1)
        else:
            self._queue.append(span)

    async def run(self) -> None:
        """Send the queued spans every flush interval, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.flush_interval_s)
            await self.send_queued()

    async def send_queued(self) -> None:
        """Send all queued spans, yielding to other tasks between batches."""
        while self._queue:
            size = min(len(self._queue), self._settings.max_batch_spans)
            for data, num_spans in self._encode([self._queue.popleft() for _ in range(size)]):
                await self._send(data, num_spans)
            await asyncio.sleep(0)

    async def _send(self, data: bytes, num_spans: int) -> None:
        try:
            await self._bus.publish_raw(self._subject, data)
        except TokenMeshError:
            self._drop(num_spans)
        else:
            self.num_sent += num_spans
            self._sent.inc(num_spans)

    def _drop(self, num_spans: int) -> None:
        self.num_dropped += num_spans
        self._dropped.inc(num_spans)

    def _encode(self, batch: Sequence[RecordedSpan]) -> Iterator[tuple[bytes, int]]:
        """Messages below the size limit; halves of a batch that is above it."""
        data = encode_request(self._resource, batch)
        if len(data) <= self._settings.max_batch_bytes:
            yield data, len(batch)
        elif len(batch) == 1:
            self._drop(1)
        else:
            middle = len(batch) // 2
            yield from self._encode(batch[:middle])
            yield from self._encode(batch[middle:])


class Telemetry:
    """The running export of one process; nothing runs while telemetry is disabled."""

    def __init__(self, exporter: BusExporter, collector: "BatchSpanProcessor | None") -> None:
        self.exporter = exporter
        self._collector = collector
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self.exporter.run())
        self._task.add_done_callback(_report_crash)

    async def stop(self) -> None:
        """Record nothing more and send what was recorded; call before the bus closes."""
        install_recorder(None)
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await self.exporter.send_queued()
        if self._collector is not None:
            # Joins the collector's thread, which may still be sending.
            await asyncio.to_thread(self._collector.shutdown)


def start_telemetry(
    service: str,
    instance_id: InstanceId,
    settings: TelemetrySettings,
    bus: Bus,
    metrics: Metrics | None = None,
) -> Telemetry:
    """Install the recorder of this process; on the event loop, once the bus is open."""
    resource = {
        "service.namespace": "tokenmesh",
        "service.name": service,
        "service.instance.id": instance_id,
        "service.version": tokenmesh.__version__,
    }
    exporter = BusExporter(service, resource, settings, bus, metrics or Metrics())
    if not settings.enabled:
        return Telemetry(exporter, None)
    finish: Callable[[RecordedSpan], None] = exporter.put
    collector = None
    if settings.otlp_endpoint:
        collector = _collector(settings, settings.otlp_endpoint)
        finish = _to_both(exporter, collector, resource)
    install_recorder(Recorder(settings, finish))
    telemetry = Telemetry(exporter, collector)
    telemetry.start()
    return telemetry


def _to_both(
    exporter: BusExporter, collector: "BatchSpanProcessor", resource: Attributes
) -> Callable[[RecordedSpan], None]:
    to_sdk = sdk_converter(resource)

    def finish(span: RecordedSpan) -> None:
        exporter.put(span)
        collector.on_end(to_sdk(span))

    return finish


# The SDK takes 0.1 s to import and most meshes have no collector, hence imports in functions.


def _collector(settings: TelemetrySettings, endpoint: str) -> "BatchSpanProcessor":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    url = endpoint.rstrip("/")
    return BatchSpanProcessor(
        OTLPSpanExporter(
            endpoint=url if url.endswith(_TRACES_PATH) else url + _TRACES_PATH,
            headers={
                name: value.get_secret_value() for name, value in settings.otlp_headers.items()
            },
            timeout=settings.otlp_timeout_s,
        ),
        max_queue_size=settings.max_queued_spans,
        max_export_batch_size=min(settings.max_queued_spans, settings.max_batch_spans),
        schedule_delay_millis=settings.flush_interval_s * 1000,
    )


def sdk_converter(resource: Attributes) -> "Callable[[RecordedSpan], ReadableSpan]":
    """Spans as the SDK's exporters read them."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

    of_process = Resource(resource)
    scope = InstrumentationScope("tokenmesh", tokenmesh.__version__)

    def context(span: RecordedSpan, span_id: str) -> SpanContext:
        flags = TraceFlags(int(span.flags, 16))
        return SpanContext(int(span.trace_id, 16), int(span_id, 16), False, flags)

    def convert(span: RecordedSpan) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            context=context(span, span.span_id),
            parent=context(span, span.parent_id) if span.parent_id is not None else None,
            resource=of_process,
            attributes=span.attributes,
            events=[Event(each.name, each.attributes, each.time_ns) for each in span.events],
            instrumentation_scope=scope,
            status=Status(StatusCode.UNSET if span.error is None else StatusCode.ERROR, span.error),
            start_time=span.start_ns,
            end_time=span.end_ns,
        )

    return convert


def _report_crash(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("spans are no longer sent", exc_info=task.exception())
