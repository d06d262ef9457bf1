"""Spans reach an OTLP/HTTP collector as well, and an absent one changes nothing else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from pydantic import SecretStr

from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.config.mesh import TelemetrySettings
from tokenmesh.shared.ids import InstanceId
from tokenmesh.shared.telemetry import Event, record_span, span, start_telemetry


@dataclass
class Collector:
    """Keeps what was posted."""

    url: str = ""
    heads: list[str] = field(default_factory=list)
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = int(head.split("content-length: ")[1].split("\r\n")[0])
        body = await reader.readexactly(size)
        collector.heads.append(head)
        collector.requests.append(ExportTraceServiceRequest.FromString(body))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        collector.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield collector


@pytest.mark.parametrize("suffix", ["", "/", "/v1/traces"])
async def test_spans_are_posted_to_the_collector(bus: MessageBus, suffix: str) -> None:
    async with collecting() as collector:
        settings = TelemetrySettings(
            otlp_endpoint=collector.url + suffix,
            otlp_headers={"authorization": SecretStr("Bearer abc")},
        )
        telemetry = start_telemetry("worker", InstanceId("worker-1"), settings, bus)
        with span("generate"):
            record_span("worker.decode", 1, 2, events=[Event("step", 1, {"batch": 4})])
        await telemetry.stop()
    names = {
        each.name
        for request in collector.requests
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for each in scope.spans
    }
    assert names == {"generate", "worker.decode"}
    assert collector.heads[0].startswith("post /v1/traces ")
    assert "authorization: bearer abc" in collector.heads[0]
    assert telemetry.exporter.num_sent == 2


async def test_a_collector_that_is_not_there_costs_no_span_on_the_bus(
    bus: MessageBus, caplog: pytest.LogCaptureFixture
) -> None:
    settings = TelemetrySettings(otlp_endpoint="http://127.0.0.1:9", otlp_timeout_s=0.2)
    telemetry = start_telemetry("worker", InstanceId("worker-1"), settings, bus)
    record_span("load", 1, 2)
    await telemetry.stop()
    assert telemetry.exporter.num_sent == 1
    assert any("Failed to export" in record.getMessage() for record in caplog.records)
