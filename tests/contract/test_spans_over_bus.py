"""Spans of one process reach the trace store of every gateway over a real NATS."""

import asyncio

from tokenmesh.services.gateway.core.operations.traces import TraceStore
from tokenmesh.services.gateway.core.tenancy.tenant import DEFAULT_TENANT, Access
from tokenmesh.shared.bus.message_bus import MessageBus, connect
from tokenmesh.shared.config.mesh import BusSettings, TelemetrySettings
from tokenmesh.shared.ids import InstanceId
from tokenmesh.shared.telemetry import record_span, span, start_telemetry

ADMIN = Access(DEFAULT_TENANT, is_admin=True)
SETTINGS = TelemetrySettings(flush_interval_s=0.01)


async def arrived(*stores: TraceStore, num_traces: int) -> None:
    """Return when each of the stores has that many traces."""
    async with asyncio.timeout(15):
        while any(len(store) < num_traces for store in stores):  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_every_gateway_gets_every_span(bus: MessageBus, bus_settings: BusSettings) -> None:
    first, second = TraceStore(SETTINGS), TraceStore(SETTINGS)
    other = await connect(bus_settings, "second gateway")
    subscriptions = [await first.follow(bus), await second.follow(other)]
    await other.flush()
    telemetry = start_telemetry("worker", InstanceId("worker-1"), SETTINGS, bus)
    with span("generate", {"tokenmesh.request_id": "chatcmpl-1"}):
        record_span("worker.queue", 1, 2)
    await telemetry.stop()
    await arrived(first, second, num_traces=1)
    for store in (first, second):
        trace = await store.get("chatcmpl-1", ADMIN)
        assert {each.name for each in trace.spans} == {"generate", "worker.queue"}
        assert {each.instance for each in trace.spans} == {"worker-1"}
    for subscription in subscriptions:
        await subscription.stop()
    await other.close()


async def test_undecodable_spans_do_not_end_the_subscription(bus: MessageBus) -> None:
    store = TraceStore(SETTINGS)
    subscription = await store.follow(bus)
    await bus.publish_raw("tm.span.worker", b"\xff\xff\xff\xff garbage")
    telemetry = start_telemetry("worker", InstanceId("worker-1"), SETTINGS, bus)
    record_span("load", 1, 2)
    await telemetry.stop()
    await arrived(store, num_traces=1)
    assert (await store.recent(1, ADMIN))[0].name == "load"
    await subscription.stop()


async def test_a_burst_above_the_queue_loses_spans_but_no_more(bus: MessageBus) -> None:
    settings = TelemetrySettings(max_queued_spans=500, max_batch_spans=20, flush_interval_s=30)
    store = TraceStore(settings)
    subscription = await store.follow(bus)
    telemetry = start_telemetry("worker", InstanceId("worker-1"), settings, bus)
    for _ in range(700):
        record_span("step", 1, 2)
    await telemetry.stop()
    await arrived(store, num_traces=500)
    assert (telemetry.exporter.num_sent, telemetry.exporter.num_dropped) == (500, 200)
    await subscription.stop()
