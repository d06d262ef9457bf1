"""Finished spans to the bus, as OTLP protobuf in batches.

A span ends on any thread and only enters a queue there; encoding and sending happen on the event
loop, a batch at a time. Nothing ever waits for telemetry: what does not fit is dropped and counted.
"""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.config.mesh import TelemetrySettings
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.telemetry.otlp import encode_request


class BusExporter(SpanProcessor):
    """Queues the spans of one process and publishes them."""

    def __init__(
        self, service: str, settings: TelemetrySettings, bus: Bus, metrics: Metrics
    ) -> None:
        self._subject = subjects.spans(service)
        self._settings = settings
        self._bus = bus
        self._queue: deque[ReadableSpan] = deque()
        self._sent = metrics.counter("spans_sent")
        self._dropped = metrics.counter("spans_dropped")
        self.num_sent = 0
        self.num_dropped = 0
        """Spans that found the queue full, were too large, or could not be sent."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span; from any thread."""
        if not span.context or not span.context.trace_flags.sampled:
            return
        if len(self._queue) >= self._settings.max_queued_spans:
            self._drop(1)
        else:
            self._queue.append(span)

    async def run(self) -> None:
        """Send what was queued, every flush interval, for ever."""
        while True:
            await asyncio.sleep(self._settings.flush_interval_s)
            await self.send_queued()

    async def send_queued(self) -> None:
        """Send everything that is queued now, giving way to other tasks between batches."""
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

    def _encode(self, batch: Sequence[ReadableSpan]) -> Iterator[tuple[bytes, int]]:
        """Messages below the size limit; halves of a batch that is above it."""
        data = encode_request(batch)
        if len(data) <= self._settings.max_batch_bytes:
            yield data, len(batch)
        elif len(batch) == 1:
            self._drop(1)
        else:
            middle = len(batch) // 2
            yield from self._encode(batch[:middle])
            yield from self._encode(batch[middle:])
