"""Spans: parents and children, sampling, and what reaches the bus."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tokenmesh.shared.clock import now_ns
from tokenmesh.shared.config.mesh import TelemetrySettings
from tokenmesh.shared.errors import BusLost
from tokenmesh.shared.ids import InstanceId
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.telemetry import (
    Event,
    Tally,
    Telemetry,
    current_trace_id,
    current_traceparent,
    record_span,
    span,
    start_telemetry,
    untraced,
)
from tokenmesh.shared.telemetry.export import sdk_converter
from tokenmesh.shared.telemetry.otlp import encode_request, encode_resource
from tokenmesh.shared.telemetry.recorder import Attributes, RecordedSpan, Recorder

CLIENT = f"00-{'a' * 32}-{'b' * 16}-01"
UNSAMPLED = f"00-{'a' * 32}-{'b' * 16}-00"


class StubBus:
    """Keeps what is published; everything else of a Bus is not telemetry's business."""

    def __init__(self) -> None:
        self.published: list[tuple[str, bytes]] = []
        self.has_published = asyncio.Event()
        self.is_lost = False

    async def publish_raw(self, subject: str, data: bytes) -> None:
        if self.is_lost:
            raise BusLost("down")
        self.published.append((subject, data))
        self.has_published.set()

    def spans(self) -> list[Span]:
        requests = [ExportTraceServiceRequest.FromString(data) for _, data in self.published]
        return [
            each
            for request in requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for each in scope.spans
        ]


@pytest.fixture
def stub() -> StubBus:
    return StubBus()


def start(stub: StubBus, **settings: object) -> Telemetry:
    chosen = TelemetrySettings.model_validate({"flush_interval_s": 0.01, **settings})
    return start_telemetry("worker", InstanceId("worker-1"), chosen, stub)  # type: ignore[arg-type]


@pytest.fixture
async def telemetry(stub: StubBus) -> AsyncIterator[Telemetry]:
    started = start(stub)
    yield started
    await started.stop()


async def test_a_span_is_the_child_of_the_one_around_it(
    stub: StubBus, telemetry: Telemetry
) -> None:
    with span("http"), span("place", {"num_tokens": 3}):
        pass
    await telemetry.exporter.send_queued()
    place, http = stub.spans()
    assert (place.name, http.name) == ("place", "http")
    assert place.parent_span_id == http.span_id
    assert place.trace_id == http.trace_id
    assert http.parent_span_id == b""
    assert place.attributes[0].key == "num_tokens"
    assert place.attributes[0].value.int_value == 3
    assert stub.published[0][0] == "tm.span.worker"


async def test_a_span_with_a_traceparent_continues_that_trace(
    stub: StubBus, telemetry: Telemetry
) -> None:
    with span("generate", parent=CLIENT):
        inner = current_traceparent()
        assert current_trace_id() == "a" * 32
    await telemetry.exporter.send_queued()
    (generate,) = stub.spans()
    assert generate.trace_id.hex() == "a" * 32
    assert generate.parent_span_id.hex() == "b" * 16
    assert inner == f"00-{'a' * 32}-{generate.span_id.hex()}-01"
    assert current_traceparent() is None


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "garbage",
        f"00-{'0' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'0' * 16}-01",
        f"ff-{'a' * 32}-{'b' * 16}-01",
        f"00-{'A' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'b' * 16}-01-more",
    ],
)
async def test_a_broken_traceparent_starts_a_new_trace(
    broken: str, stub: StubBus, telemetry: Telemetry
) -> None:
    with span("http", parent=broken):
        pass
    await telemetry.exporter.send_queued()
    (http,) = stub.spans()
    assert http.trace_id.hex() not in ("a" * 32, "0" * 32)
    assert http.parent_span_id == b""


async def test_an_unsampled_client_is_not_traced_but_its_trace_goes_on(
    stub: StubBus, telemetry: Telemetry
) -> None:
    with span("http", parent=UNSAMPLED):
        passed_on = current_traceparent()
        record_span("worker.queue", 1, 2)
    await telemetry.exporter.send_queued()
    assert stub.spans() == []
    assert passed_on is not None
    assert passed_on.startswith(f"00-{'a' * 32}-")
    assert passed_on.endswith("-00")


async def test_work_that_is_not_traced_passes_the_trace_on_unsampled(
    stub: StubBus, telemetry: Telemetry
) -> None:
    with span("outer"):
        outer = current_traceparent() or ""
        with untraced():
            with span("inner"):
                inner = current_traceparent() or ""
            record_span("past", 1, 2)
        with span("after"):
            pass
        assert current_traceparent() == outer
    assert (inner[:35], inner[-2:]) == (outer[:35], "00")
    await telemetry.exporter.send_queued()
    assert {each.name for each in stub.spans()} == {"outer", "after"}


async def test_the_sample_ratio_decides_for_whole_traces(stub: StubBus) -> None:
    telemetry = start(stub, sample_ratio=0.5)
    for _ in range(200):
        with span("http"):
            record_span("worker.queue", 1, 2)
    await telemetry.stop()
    traces = {each.trace_id for each in stub.spans()}
    assert 40 < len(traces) < 160
    assert len(stub.spans()) == 2 * len(traces)


async def test_a_past_span_keeps_its_times_and_events(stub: StubBus, telemetry: Telemetry) -> None:
    decode = record_span(
        "worker.decode",
        1_000,
        5_000,
        parent=CLIENT,
        attributes={"tokenmesh.request_id": "chatcmpl-1", "steps": 2},
        events=[Event("step", 2_000, {"batch": 4, "kv": 0.5}), Event("step", 3_000)],
    )
    record_span("inner", 2_000, 3_000, parent=decode)
    await telemetry.exporter.send_queued()
    found, inner = stub.spans()
    assert (found.start_time_unix_nano, found.end_time_unix_nano) == (1_000, 5_000)
    assert [event.time_unix_nano for event in found.events] == [2_000, 3_000]
    assert found.events[0].attributes[1].value.double_value == 0.5
    assert found.parent_span_id.hex() == "b" * 16
    assert inner.parent_span_id == found.span_id


async def test_a_past_span_without_parent_is_a_trace_of_its_own(
    stub: StubBus, telemetry: Telemetry
) -> None:
    record_span("load", 1, 2)
    record_span("load", 1, 2)
    await telemetry.exporter.send_queued()
    first, second = stub.spans()
    assert first.trace_id != second.trace_id
    assert first.parent_span_id == b""


async def test_an_error_marks_the_span_and_goes_on(stub: StubBus, telemetry: Telemetry) -> None:
    with pytest.raises(ValueError, match="no such"), span("place"):
        raise ValueError("no such worker")
    await telemetry.exporter.send_queued()
    (place,) = stub.spans()
    assert place.status.code == 2
    assert place.status.message == "ValueError: no such worker"
    assert [event.name for event in place.events] == ["exception"]


async def test_a_span_keeps_no_more_than_its_bounds(stub: StubBus) -> None:
    telemetry = start(
        stub, max_span_attributes=2, max_span_events=3, max_attribute_chars=16, flush_interval_s=60
    )
    with span("http", {"first": "x" * 50, "second": 2, "third": 3}) as current:
        current.set_attribute("second", 22)
        for number in range(5):
            current.add_event("step", {"number": number, "text": "y" * 50})
    await telemetry.stop()
    (http,) = stub.spans()
    kept = {each.key: each.value for each in http.attributes}
    assert kept["first"].string_value == "x" * 16
    assert kept["second"].int_value == 22
    assert kept.keys() == {"first", "second"}
    assert [event.attributes[0].value.int_value for event in http.events] == [0, 1, 2]
    assert http.events[0].attributes[1].value.string_value == "y" * 16


async def test_a_cancellation_is_noted_and_is_no_failure(
    stub: StubBus, telemetry: Telemetry
) -> None:
    with pytest.raises(asyncio.CancelledError), span("place"):
        raise asyncio.CancelledError
    await telemetry.exporter.send_queued()
    (place,) = stub.spans()
    assert place.status.code == 0
    assert [event.name for event in place.events] == ["cancelled"]


async def test_spans_leave_by_themselves_within_the_flush_interval(
    stub: StubBus, telemetry: Telemetry
) -> None:
    with span("http"):
        pass
    await asyncio.wait_for(stub.has_published.wait(), timeout=15)
    assert [each.name for each in stub.spans()] == ["http"]


async def test_stop_sends_what_is_left_and_records_nothing_more(stub: StubBus) -> None:
    telemetry = start(stub, flush_interval_s=60)
    with span("last"):
        pass
    await telemetry.stop()
    with span("too late"):
        pass
    await telemetry.stop()
    assert [each.name for each in stub.spans()] == ["last"]


async def test_a_full_queue_drops_and_counts(stub: StubBus) -> None:
    telemetry = start(stub, max_queued_spans=10, flush_interval_s=60)
    for _ in range(25):
        record_span("step", 1, 2)
    await telemetry.stop()
    assert len(stub.spans()) == 10
    assert (telemetry.exporter.num_sent, telemetry.exporter.num_dropped) == (10, 15)


async def test_sent_and_dropped_spans_are_metrics(stub: StubBus) -> None:
    metrics = Metrics()
    settings = TelemetrySettings(max_queued_spans=10, flush_interval_s=60)
    telemetry = start_telemetry("worker", InstanceId("worker-1"), settings, stub, metrics)  # type: ignore[arg-type]
    for _ in range(25):
        record_span("step", 1, 2)
    await telemetry.stop()
    text = metrics.render().decode()
    assert "tokenmesh:spans_sent_total 10.0" in text
    assert "tokenmesh:spans_dropped_total 15.0" in text


async def test_a_lost_bus_costs_spans_and_nothing_else(stub: StubBus) -> None:
    telemetry = start(stub)
    stub.is_lost = True
    record_span("lost", 1, 2)
    await telemetry.exporter.send_queued()
    stub.is_lost = False
    record_span("sent", 1, 2)
    await telemetry.stop()
    assert [each.name for each in stub.spans()] == ["sent"]
    assert telemetry.exporter.num_dropped == 1


async def test_messages_stay_below_the_limit(stub: StubBus) -> None:
    telemetry = start(stub, max_batch_bytes=4096, max_batch_spans=64)
    for _ in range(64):
        record_span("small", 1, 2, attributes={"text": "x" * 200})
    record_span("huge", 1, 2, attributes={"text": "x" * 5000})
    await telemetry.stop()
    assert max(len(data) for _, data in stub.published) <= 4096
    assert [each.name for each in stub.spans()] == ["small"] * 64
    assert telemetry.exporter.num_dropped == 1


async def test_a_tally_is_one_span_over_all_its_stretches(
    stub: StubBus, telemetry: Telemetry
) -> None:
    tally = Tally("flush")
    before_ns = now_ns()
    for _ in range(3):
        with tally:
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.01)
    tally.record({"tokenmesh.request_id": "chatcmpl-1"}, parent=CLIENT)
    await telemetry.exporter.send_queued()
    (flush,) = stub.spans()
    facts = {each.key: each.value for each in flush.attributes}
    assert facts["count"].int_value == 3
    length_ms = (flush.end_time_unix_nano - flush.start_time_unix_nano) / 1e6
    assert 6 <= facts["busy_ms"].double_value <= length_ms - 20
    assert flush.start_time_unix_nano >= before_ns
    assert flush.parent_span_id.hex() == "b" * 16


async def test_a_tally_without_a_stretch_is_no_span(stub: StubBus, telemetry: Telemetry) -> None:
    Tally("flush").record()
    await telemetry.exporter.send_queued()
    assert stub.spans() == []


async def test_disabled_telemetry_sends_nothing_and_passes_the_trace_on(stub: StubBus) -> None:
    telemetry = start(stub, enabled=False)
    with span("http", parent=CLIENT):
        assert current_traceparent() == CLIENT
        assert record_span("worker.queue", 1, 2) == CLIENT
    await telemetry.stop()
    assert stub.published == []


RESOURCE = {"service.name": "worker", "service.instance.id": "worker-1"}


def recorded() -> list[RecordedSpan]:
    """Spans with every kind of content."""
    finished: list[RecordedSpan] = []
    recorder = Recorder(TelemetrySettings(), finished.append)
    values: Attributes = {
        "text": "x" * 300,
        "empty": "",
        "yes": True,
        "small": 127,
        "large": 2**62,
        "negative": -5,
        "float": -1.5,
        "texts": ["a", "b"],
        "numbers": [1, 2**40],
    }
    shared = Event("step", 9, {"batch": 128, "kv": 0.25})
    outer = recorder.record("outer \u00e9\u4e2d", (1, 2), None, values, [shared])
    inner = recorder.record("inner", (7, 2**60), outer, None, [shared, Event("preempted", 10)])
    inner.fail("it broke")
    return finished


def official(spans: list[RecordedSpan]) -> ExportTraceServiceRequest:
    """Encode with OpenTelemetry's encoder, less the fields that ours leaves out."""
    request = encode_spans([sdk_converter(RESOURCE)(each) for each in spans])
    for resource in request.resource_spans:
        resource.resource.attributes.sort(key=lambda each: each.key, reverse=True)
        for scope in resource.scope_spans:
            scope.ClearField("scope")
            for each in scope.spans:
                each.ClearField("flags")
                if not each.status.code:
                    each.ClearField("status")
    return request


def test_our_encoder_writes_what_the_official_one_does() -> None:
    spans = recorded()
    ours = encode_request(encode_resource(RESOURCE), spans)
    assert ExportTraceServiceRequest.FromString(ours) == official(spans)


def test_a_shared_event_is_encoded_once() -> None:
    outer, inner = recorded()
    encode_request(b"", [outer])
    assert outer.events[0].encoded is not None
    outer.events[0].encoded = outer.events[0].encoded.replace(b"batch", b"BATCH")
    assert b"BATCH" in encode_request(b"", [inner])


def test_an_empty_request_is_valid() -> None:
    request = ExportTraceServiceRequest.FromString(encode_request(b"", []))
    assert not request.resource_spans[0].scope_spans[0].spans


async def test_a_generator_that_is_closed_elsewhere_ends_its_span(
    stub: StubBus, telemetry: Telemetry
) -> None:
    async def steps() -> AsyncIterator[int]:
        with span("steps"):
            yield 1
            yield 2

    generator = steps()
    await asyncio.create_task(anext(generator))  # type: ignore[arg-type]
    await asyncio.create_task(generator.aclose())  # type: ignore[attr-defined]
    await telemetry.exporter.send_queued()
    (found,) = stub.spans()
    assert [event.name for event in found.events] == ["cancelled"]
