"""The spans of a chat with an image, in tokenizer and encoder, as one tree each."""

import asyncio
import secrets
from pathlib import Path

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.fakes.images import data_uri, image_file, picture
from tests.fakes.llava import llava
from tests.fakes.service_mesh import running
from tokenmesh.services.mm_encoder_svc.main import build as build_encoder
from tokenmesh.services.tokenizer_svc.main import build as build_tokenizer
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings, TelemetrySettings
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.ids import InstanceId, ModelName, RequestId
from tokenmesh.shared.messages import Encode, Encoded
from tokenmesh.shared.messages.tokenize import ChatPrompt, Tokenize, Tokenized
from tokenmesh.shared.telemetry import span, start_telemetry

MODEL = ModelName("llava")
SERVICE = "test"

TREE = {
    "request": {
        "tokenize": {
            "media": {"fetch": {}, "preprocess": {}},
            "render": {},
            "encode": {},
            "hash": {},
        },
        "encode_media": {"tower": {}},
    }
}


NUM_SPANS = 10


def spans_of(data: list[bytes]) -> list[Span]:
    return [
        each
        for request in map(ExportTraceServiceRequest.FromString, data)
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for each in scope.spans
    ]


def tree_of(spans: list[Span]) -> dict[str, object]:
    """Names as nested dicts, children in order of their start."""
    found = sorted(spans, key=lambda each: each.start_time_unix_nano)
    nodes: dict[bytes, dict[str, object]] = {each.span_id: {} for each in found}
    root: dict[str, object] = {}
    for each in found:
        nodes.get(each.parent_span_id, root)[each.name] = nodes[each.span_id]
    return root


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava(tmp_path_factory.mktemp("llava"))


async def chat(bus: MessageBus) -> None:
    # An image that no other test has sent: nothing of it is cached.
    uri = data_uri(image_file(picture(secrets.randbits(32))))
    content = [{"type": "image_url", "image_url": {"url": uri}}]
    messages = msgspec.json.encode([{"role": "user", "content": content}])
    prompt = ChatPrompt(messages_json=messages)
    with span("request"):
        tokenize = Tokenize(request_id=RequestId("r"), model=MODEL, prompt=prompt)
        tokenized = await bus.request(subjects.tokenize(MODEL), tokenize, deadline_s=now_s() + 10)
        assert isinstance(tokenized, Tokenized)
        encode = Encode(request_id=RequestId("r"), model=MODEL, items=tokenized.media)
        encoded = await bus.request(subjects.encode(MODEL), encode, deadline_s=now_s() + 10)
        assert isinstance(encoded, Encoded)


async def test_the_spans_of_an_image_form_one_tree(
    checkpoint: Path, bus: MessageBus, bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    received: list[bytes] = []

    async def receive(subject: str, data: bytes) -> None:
        received.append(data)

    subscription = await bus.subscribe_raw(subjects.spans(SERVICE), receive)
    model = ModelSettings(model=str(checkpoint), served_model_name=(MODEL,))
    settings = Settings(models=(model,), bus=bus_settings, redis=redis_settings)
    async with (
        running("tokenizer", settings, build_tokenizer),
        running("encoder", settings, build_encoder),
    ):
        telemetry = start_telemetry(SERVICE, InstanceId("test-1"), TelemetrySettings(), bus)
        try:
            await chat(bus)
        finally:
            await telemetry.stop()
    async with asyncio.timeout(15):
        while len(spans_of(received)) < NUM_SPANS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert tree_of(spans_of(received)) == TREE
    await subscription.stop()
