"""Publisher: what becomes of a step's deltas when the bus does not take them."""

from typing import Any

import msgspec
import pytest

from tokenmesh.engine.core.outputs import StepOutput
from tokenmesh.engine.request.spec import StreamKey
from tokenmesh.services.worker_svc.load import LoadBook
from tokenmesh.services.worker_svc.publisher import Publisher
from tokenmesh.services.worker_svc.streams import WorkerStreams
from tokenmesh.services.worker_svc.telemetry import WorkerMetrics
from tokenmesh.shared import codec, subjects
from tokenmesh.shared.bus.base import Headers
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import BusLost
from tokenmesh.shared.failed import Failed
from tokenmesh.shared.ids import GatewayId, ModelName, WorkerId
from tokenmesh.shared.messages import Message, Tokens
from tokenmesh.shared.messages.tokens import Delta, TokenLogprobs
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.tokens import pack_ids, unpack_ids

WORKER, GATEWAY, OTHER = WorkerId("w"), GatewayId("one"), GatewayId("other")
SETTINGS = WorkerSettings()
MAX_BYTES = 400


class SmallBus:
    """Takes messages up to MAX_BYTES, and none while it is lost."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Tokens]] = []
        self.is_lost = False

    async def publish(
        self, subject: str, message: Message | Tokens, *, headers: Headers | None = None
    ) -> None:
        assert isinstance(message, Tokens)
        codec.encode(message, MAX_BYTES)
        if self.is_lost:
            raise BusLost("the server is away")
        self.sent.append((subject, message))


@pytest.fixture
def bus() -> SmallBus:
    return SmallBus()


@pytest.fixture
def streams() -> WorkerStreams:
    return WorkerStreams(SETTINGS)


@pytest.fixture
def publisher(bus: SmallBus, streams: WorkerStreams) -> Publisher:
    meters = WorkerMetrics(Metrics(), ModelName("m"), WORKER, LoadBook(SETTINGS, 8))
    return Publisher(bus, WORKER, 5, streams, meters)  # type: ignore[arg-type]


def wide(stream: int, num_logprobs: int) -> Delta:
    """A delta of about 20 bytes a logprob."""
    entries = [TokenLogprobs(1, -1.0, 1) for _ in range(num_logprobs)]
    return Delta(stream, 0, 0, pack_ids([1]), logprobs=entries)


async def test_a_step_is_one_message_for_each_gateway(bus: SmallBus, publisher: Publisher) -> None:
    one, two, three = (Delta(stream, 0, 0, pack_ids([stream])) for stream in (1, 2, 3))
    await publisher.publish([StepOutput(9, {GATEWAY: [one, three], OTHER: [two]})])
    assert bus.sent == [
        (subjects.gateway_tokens(GATEWAY), Tokens(WORKER, 5, 9, [one, three])),
        (subjects.gateway_tokens(OTHER), Tokens(WORKER, 5, 9, [two])),
    ]


async def test_steps_that_waited_leave_as_one_message_with_one_delta_a_stream(
    bus: SmallBus, publisher: Publisher
) -> None:
    first = Delta(1, 0, 0, pack_ids([4]), cached_tokens=16)
    last = Delta(1, 0, 2, pack_ids([6]), finish="stop", stop_token=6)
    steps = [
        StepOutput(1, {GATEWAY: [first, Delta(2, 0, 5, pack_ids([7]))]}),
        StepOutput(2, {GATEWAY: [Delta(1, 0, 1, pack_ids([5]))], OTHER: [Delta(3, 0, 0, b"")]}),
        StepOutput(3, {GATEWAY: [last]}),
    ]
    await publisher.publish(steps)
    joined = Delta(1, 0, 0, pack_ids([4, 5, 6]), "stop", 6, cached_tokens=16)
    assert bus.sent == [
        (
            subjects.gateway_tokens(GATEWAY),
            Tokens(WORKER, 5, 3, [joined, Delta(2, 0, 5, pack_ids([7]))]),
        ),
        (subjects.gateway_tokens(OTHER), Tokens(WORKER, 5, 3, [Delta(3, 0, 0, b"")])),
    ]


async def test_log_probabilities_and_another_attempt_stay_deltas_of_their_own(
    bus: SmallBus, publisher: Publisher
) -> None:
    entries = [TokenLogprobs(1, -1.0, 1)]
    deltas = [Delta(1, 0, at, pack_ids([1]), logprobs=entries) for at in range(2)]
    deltas += [Delta(2, attempt, 0, pack_ids([1])) for attempt in range(2)]
    await publisher.publish(
        [StepOutput(step, {GATEWAY: [each]}) for step, each in enumerate(deltas)]
    )
    assert bus.sent[0][1].deltas == deltas


async def test_a_message_over_the_limit_is_split_by_stream(
    bus: SmallBus, publisher: Publisher
) -> None:
    deltas = [wide(stream, 10) for stream in (1, 2, 3)]
    await publisher.send(GATEWAY, deltas)
    assert [message.deltas for _, message in bus.sent] == [[delta] for delta in deltas]


async def test_a_delta_over_the_limit_ends_its_stream_with_an_error(
    bus: SmallBus, publisher: Publisher
) -> None:
    await publisher.send(GATEWAY, [wide(1, 100), Delta(2, 0, 0, pack_ids([7]))])
    first, second = (message.deltas[0] for _, message in bus.sent)
    assert (first.stream, first.finish) == (1, "error")
    assert first.error is not None
    assert first.error.code == "payload_too_large"
    assert (second.stream, second.finish) == (2, None)


async def test_what_a_lost_bus_did_not_take_can_be_sent_again(
    bus: SmallBus, publisher: Publisher, streams: WorkerStreams
) -> None:
    stream = streams.open(StreamKey(GATEWAY, 1, 0), 0)
    bus.is_lost = True
    await publisher.publish([StepOutput(1, {GATEWAY: [Delta(1, 0, 0, pack_ids([4]))]})])
    bus.is_lost = False
    await publisher.publish([StepOutput(2, {GATEWAY: [Delta(1, 0, 1, pack_ids([5]))]})])
    assert len(bus.sent) == 1
    replay = stream.replay(0)
    assert replay is not None
    assert unpack_ids(replay.token_ids) == [4, 5]


@pytest.mark.parametrize("name", Delta.__struct_fields__[4:])
async def test_whatever_a_delta_says_is_also_said_by_joined_ones_and_when_sent_again(
    bus: SmallBus, publisher: Publisher, streams: WorkerStreams, name: str
) -> None:
    entries = [TokenLogprobs(1, -1.0, 1)]
    values: dict[str, Any] = {
        "finish": "error",
        "stop_token": 6,
        "logprobs": entries,
        "cached_tokens": 16,
        "prompt_logprobs": [None, *entries],
        "error": Failed(code="internal_error", message="why"),
        "alignment": [0, 2],
        "drafts": (8, 7),
    }
    value = values[name]
    place = {"finish": 2, "stop_token": 2, "error": 2, "drafts": 1}.get(name, 0)
    deltas = [Delta(1, 0, at, pack_ids([at])) for at in range(3)]
    deltas[place] = msgspec.structs.replace(deltas[place], **{name: value})
    if place == 2:  # an ending
        deltas[2] = msgspec.structs.replace(deltas[2], finish="error")
    stream = streams.open(StreamKey(GATEWAY, 1, 0), 0)
    await publisher.publish([StepOutput(at, {GATEWAY: [each]}) for at, each in enumerate(deltas)])
    sent = [each for _, message in bus.sent for each in message.deltas]
    replay = stream.replay(0)
    assert replay is not None
    for received in (sent, [replay]):
        assert [getattr(each, name) for each in received if getattr(each, name)] == [value]
        assert b"".join(each.token_ids for each in received) == pack_ids([0, 1, 2])
