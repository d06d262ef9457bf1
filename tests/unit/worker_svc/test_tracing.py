"""The spans of a stream, as they leave the worker."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.core.sim import SimRunner, SimVocabulary
from tokenmesh.engine.request.request import Request
from tokenmesh.services.worker_svc.telemetry import record_spans
from tokenmesh.shared.config.mesh import TelemetrySettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.hashing import Adapter
from tokenmesh.shared.ids import InstanceId
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.messages.pooling import PoolingParams
from tokenmesh.shared.telemetry import Telemetry, start_telemetry

MakeRequest = Callable[..., Request]
PARENT = f"00-{'a' * 32}-{'b' * 16}-01"
SETTINGS = WorkerSettings(
    sim_time_scale=0.0, num_gpu_blocks_override=6, block_size=4, max_num_batched_tokens=8
)


class SpanBus:
    """Keeps the spans that are published on it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    async def publish_raw(self, subject: str, data: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans


@pytest.fixture
def bus() -> SpanBus:
    return SpanBus()


@pytest.fixture
async def telemetry(bus: SpanBus) -> AsyncIterator[Telemetry]:
    settings = TelemetrySettings(flush_interval_s=0.01)
    started = start_telemetry("worker", InstanceId("w"), settings, bus)  # type: ignore[arg-type]
    yield started
    await started.stop()


def attributes(span: Span) -> dict[str, Any]:
    values = {each.key: each.value for each in span.attributes}
    return {key: getattr(value, str(value.WhichOneof("value"))) for key, value in values.items()}


async def test_queue_chunks_and_decode_are_spans_of_the_senders_one(
    bus: SpanBus, telemetry: Telemetry, make_request: MakeRequest
) -> None:
    engine = Engine(SimRunner(SimVocabulary(100), SETTINGS, lambda _: None), SETTINGS)
    engine.add(make_request(1, list(range(10)), max_tokens=5, traceparent=PARENT))
    engine.add(make_request(2, list(range(50, 53)), max_tokens=12, traceparent=PARENT))
    while engine.has_work:
        engine.step()
    for ended in engine.take_output().ended:
        record_spans(ended)
    await telemetry.exporter.send_queued()
    spans = [span for span in bus.spans if attributes(span)["tokenmesh.request_id"] == "r1"]
    assert [span.name for span in spans] == [
        "worker.queue",
        "worker.prefill",
        "worker.prefill",
        "worker.decode",
    ]
    assert all(span.parent_span_id == bytes.fromhex("b" * 16) for span in spans)
    assert [attributes(span)["tokens"] for span in spans[1:3]] == [8, 2]
    facts = attributes(spans[3])
    assert (facts["prompt_tokens"], facts["output_tokens"]) == (10, 5)
    assert facts["finish_reason"] == "length"
    times = [span.end_time_unix_nano for span in spans]
    assert times == sorted(times)
    steps = [event for event in spans[3].events if event.name == "step"]
    assert len(steps) >= 4
    assert {each.key for each in steps[0].attributes} == {"batch_size", "tokens", "kv_used"}


@pytest.mark.parametrize("params", [None, PoolingParams(task="embed")])
async def test_spans_name_the_adapter(
    bus: SpanBus, telemetry: Telemetry, make_request: MakeRequest, params: PoolingParams | None
) -> None:
    engine = Engine(SimRunner(SimVocabulary(100), SETTINGS, lambda _: None, 8), SETTINGS)
    spec = {"traceparent": PARENT, "lora": Adapter("sql", "1"), "pooling": params}
    engine.add(make_request(1, [3, 4], max_tokens=2, **spec))
    while engine.has_work:
        engine.step()
    for ended in engine.take_output().ended:
        record_spans(ended)
    await telemetry.exporter.send_queued()
    names = {span.name: attributes(span)["adapter"] for span in bus.spans}
    found = ["worker.queue", "worker.prefill", *(["worker.decode"] if params is None else [])]
    assert names == dict.fromkeys(found, "sql")


async def test_a_chunk_has_the_number_of_its_tokens_that_take_embeddings(
    bus: SpanBus, telemetry: Telemetry, make_request: MakeRequest
) -> None:
    engine = Engine(SimRunner(SimVocabulary(100), SETTINGS, lambda _: None), SETTINGS)
    image = MediaItem(kind="image", content_hash="a", offset=2, length=8, holes=((3, 4),))
    request = make_request(1, list(range(12)), traceparent=PARENT, media=[image])
    engine.add(request)
    while engine.has_work:
        engine.step()
    for ended in engine.take_output().ended:
        record_spans(ended)
    await telemetry.exporter.send_queued()
    chunks = [attributes(span) for span in bus.spans if span.name == "worker.prefill"]
    assert [(each["tokens"], each["media_tokens"]) for each in chunks] == [(8, 5), (4, 2)]


async def test_a_preemption_is_an_event_of_the_decode(
    bus: SpanBus, telemetry: Telemetry, make_request: MakeRequest
) -> None:
    engine = Engine(SimRunner(SimVocabulary(100), SETTINGS, lambda _: None), SETTINGS)
    engine.add(make_request(1, list(range(4)), max_tokens=12, traceparent=PARENT))
    engine.add(make_request(2, list(range(50, 54)), max_tokens=12, traceparent=PARENT))
    while engine.has_work:
        engine.step()
    for ended in engine.take_output().ended:
        record_spans(ended)
    await telemetry.exporter.send_queued()
    decodes = [span for span in bus.spans if span.name == "worker.decode"]
    names = [event.name for span in decodes for event in span.events]
    assert names.count("preempted") == 1
    assert [attributes(span)["preemptions"] for span in decodes] == [0, 1]


async def test_waiting_for_a_grammar_is_a_span_before_the_queue(
    bus: SpanBus, telemetry: Telemetry, make_request: MakeRequest
) -> None:
    engine = Engine(SimRunner(SimVocabulary(100), SETTINGS, lambda _: None), SETTINGS)
    request = make_request(1, [3, 4], traceparent=PARENT)
    request.timeline.arrived_ns = 100
    request.timeline.grammar_ns = 300
    engine.add(request)
    while engine.has_work:
        engine.step()
    for ended in engine.take_output().ended:
        record_spans(ended)
    await telemetry.exporter.send_queued()
    grammar, queue, *_ = bus.spans
    assert (grammar.name, queue.name) == ("worker.grammar", "worker.queue")
    times = (grammar.start_time_unix_nano, grammar.end_time_unix_nano, queue.start_time_unix_nano)
    assert times == (100, 300, 300)
