"""start_telemetry: from now on the spans of this process go to the bus, and to OTLP if asked."""

import asyncio
import logging
from contextlib import suppress

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor

import tokenmesh
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.config.mesh import TelemetrySettings
from tokenmesh.shared.ids import InstanceId
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.telemetry.bus_exporter import BusExporter
from tokenmesh.shared.telemetry.recorder import install_recorder
from tokenmesh.shared.telemetry.sdk_recorder import SdkRecorder

logger = logging.getLogger(__name__)

_TRACES_PATH = "/v1/traces"


class Telemetry:
    """The running export of one process; nothing runs while telemetry is disabled."""

    def __init__(self, recorder: SdkRecorder | None, exporter: BusExporter) -> None:
        self._recorder = recorder
        self.exporter = exporter
        self._task = asyncio.create_task(exporter.run()) if recorder else None
        if self._task:
            self._task.add_done_callback(_report_crash)

    async def stop(self) -> None:
        """Record nothing more and send what was recorded; call before the bus closes."""
        install_recorder(None)
        if self._recorder is None or self._task is None:
            return
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self.exporter.send_queued()
        # Joins the OTLP thread, which may still be sending.
        await asyncio.to_thread(self._recorder.shutdown)
        self._recorder = None


def start_telemetry(
    service: str,
    instance_id: InstanceId,
    settings: TelemetrySettings,
    bus: Bus,
    metrics: Metrics | None = None,
) -> Telemetry:
    """Install the recorder of this process; on the event loop, once the bus is open."""
    exporter = BusExporter(service, settings, bus, metrics or Metrics())
    if not settings.enabled:
        return Telemetry(None, exporter)
    processors: list[SpanProcessor] = [exporter]
    if settings.otlp_endpoint:
        processors.append(_otlp_processor(settings, settings.otlp_endpoint))
    recorder = SdkRecorder(settings, _resource(service, instance_id), processors)
    install_recorder(recorder)
    return Telemetry(recorder, exporter)


def _resource(service: str, instance_id: InstanceId) -> Resource:
    return Resource(
        {
            "service.namespace": "tokenmesh",
            "service.name": service,
            "service.instance.id": instance_id,
            "service.version": tokenmesh.__version__,
        }
    )


def _otlp_processor(settings: TelemetrySettings, endpoint: str) -> BatchSpanProcessor:
    # Costs 60 ms to import, and most meshes have no collector.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

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


def _report_crash(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("spans are no longer sent", exc_info=task.exception())
