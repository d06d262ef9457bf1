"""The bus against a real server: answers, errors, queue groups, restarts, junk."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop
from pydantic import SecretStr

from tests.servers import Server, bus_settings_of, free_port
from tokenmesh.shared.bus.base import Envelope, Receiver
from tokenmesh.shared.bus.message_bus import MessageBus, connect
from tokenmesh.shared.bus.nats_client import FastClient
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.mesh import BusSettings, TelemetrySettings
from tokenmesh.shared.errors import (
    BusLost,
    ConfigError,
    DeadlineExceeded,
    NoResponders,
    Overloaded,
    PayloadTooLarge,
    ProtocolError,
    UnknownModel,
)
from tokenmesh.shared.ids import InstanceId, WorkerId
from tokenmesh.shared.messages import Detokenized, Done, Message, Ping, Queued, Tokens
from tokenmesh.shared.messages.failed import to_failed
from tokenmesh.shared.messages.tokens import Delta
from tokenmesh.shared.telemetry import current_traceparent, span, start_telemetry

IMMEDIATE_S = 2.0  # A starved machine may take a second; a lost request takes its deadline.


def soon() -> float:
    return now_s() + 3.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


@pytest.fixture
async def other(bus_settings: BusSettings) -> AsyncIterator[MessageBus]:
    """A second connection: the process at the other end."""
    connection = await connect(bus_settings, "other")
    yield connection
    await connection.close()


async def answer_with(bus: MessageBus, subject: str, *answers: Message) -> list[Envelope]:
    """Answer everything on `subject` with all of `answers`; returns what will have arrived."""
    received: list[Envelope] = []

    async def receiver(envelope: Envelope) -> None:
        received.append(envelope)
        for answer in answers:
            await bus.reply(envelope, answer)

    await bus.subscribe(subject, receiver)
    await bus.flush()
    return received


async def test_request_returns_the_answer_and_carries_deadline_and_trace(
    bus: MessageBus, other: MessageBus
) -> None:
    received = await answer_with(other, "t.echo", Detokenized(text="hello"))
    deadline_s = soon()
    telemetry = start_telemetry("test", InstanceId("test-1"), TelemetrySettings(), bus)
    with span("asking"):
        expected = current_traceparent()
        answer = await bus.request("t.echo", Ping(), deadline_s=deadline_s)
    await telemetry.stop()
    assert answer == Detokenized(text="hello")
    assert received[0].message == Ping()
    assert received[0].headers.traceparent == expected
    assert received[0].headers.deadline_s == pytest.approx(deadline_s, abs=0.1)
    assert expected is not None


async def test_request_without_listener_fails_at_once(bus: MessageBus) -> None:
    started = time.perf_counter()
    with pytest.raises(NoResponders):
        await bus.request("t.unused", Ping(), deadline_s=soon())
    assert time.perf_counter() - started < IMMEDIATE_S


async def test_retries_find_a_listener_that_comes_late(bus: MessageBus, other: MessageBus) -> None:
    asking = asyncio.create_task(bus.request("t.late", Ping(), deadline_s=soon(), retries=5))
    with pytest.raises(NoResponders):
        await bus.request("t.late", Ping(), deadline_s=soon())
    await answer_with(other, "t.late", Done())
    assert await asking == Done()


async def test_retries_stop_before_the_deadline(bus: MessageBus) -> None:
    deadline_s = now_s() + 0.3
    with pytest.raises(NoResponders):
        await bus.request("t.never", Ping(), deadline_s=deadline_s, retries=100)
    assert now_s() < deadline_s


async def test_failed_answer_is_raised_as_its_error(bus: MessageBus, other: MessageBus) -> None:
    error = UnknownModel("no such model", param="model", retry_after_s=2.5)
    await answer_with(other, "t.fail", to_failed(error))
    with pytest.raises(UnknownModel) as caught:
        await bus.request("t.fail", Ping(), deadline_s=soon())
    assert (caught.value.message, caught.value.param, caught.value.retry_after_s) == (
        "no such model",
        "model",
        2.5,
    )


async def test_silent_listener_costs_exactly_the_deadline(
    bus: MessageBus, other: MessageBus
) -> None:
    await answer_with(other, "t.silent")
    deadline_s = now_s() + 0.1
    with pytest.raises(DeadlineExceeded):
        await bus.request("t.silent", Ping(), deadline_s=deadline_s)
    assert 0 <= now_s() - deadline_s < IMMEDIATE_S
    with pytest.raises(DeadlineExceeded):
        await bus.request("t.silent", Ping(), deadline_s=deadline_s)


async def test_late_answer_reaches_no_request(bus: MessageBus, other: MessageBus) -> None:
    received = await answer_with(other, "t.slow")
    with pytest.raises(DeadlineExceeded):
        await bus.request("t.slow", Ping(), deadline_s=now_s() + 0.05)
    await other.reply(received[0], Detokenized(text="late"))
    await other.flush()
    await answer_with(other, "t.next", Done())
    assert await bus.request("t.next", Ping(), deadline_s=soon()) == Done()


async def test_junk_answer_is_a_protocol_error(bus: MessageBus, other: MessageBus) -> None:
    async def receiver(envelope: Envelope) -> None:
        assert envelope.reply_to is not None
        await other.publish_raw(envelope.reply_to, b"\xc1junk")

    await other.subscribe("t.junk", receiver)
    await other.flush()
    with pytest.raises(ProtocolError):
        await bus.request("t.junk", Ping(), deadline_s=soon())


async def test_undecodable_request_is_counted_answered_and_survived(
    bus: MessageBus, other: MessageBus
) -> None:
    received = await answer_with(other, "t.robust", Done())
    for junk in (b"", b"\xc1", b"{}", b"\x90", b"\x81\xa4type\xa4Nope", b"\x91" * 5000):
        await bus.publish_raw("t.robust", junk)
    assert await bus.request("t.robust", Ping(), deadline_s=soon()) == Done()
    assert len(received) == 1
    assert other.counts["undecodable"] == 6


async def test_conversation_yields_keep_alives_and_ends_with_the_answer(
    bus: MessageBus, other: MessageBus
) -> None:
    await answer_with(other, "t.talk", Queued(position=2), Queued(position=1), Done())
    answers = [
        answer async for answer in bus.converse("t.talk", Ping(), deadline_s=soon(), idle_s=1.0)
    ]
    assert answers == [Queued(position=2), Queued(position=1), Done()]


async def test_silent_conversation_ends_after_its_idle_time(
    bus: MessageBus, other: MessageBus
) -> None:
    await answer_with(other, "t.mumble", Queued(position=1))
    conversation = bus.converse("t.mumble", Ping(), deadline_s=soon(), idle_s=0.1)
    assert await anext(conversation) == Queued(position=1)
    with pytest.raises(DeadlineExceeded):
        await anext(conversation)


async def test_conversation_without_listener_fails_at_once(bus: MessageBus) -> None:
    started = time.perf_counter()
    with pytest.raises(NoResponders):
        await anext(bus.converse("t.unused", Ping(), deadline_s=soon(), idle_s=1.0))
    assert time.perf_counter() - started < IMMEDIATE_S


async def test_queue_group_shares_and_plain_subscribers_all_hear(
    bus: MessageBus, other: MessageBus
) -> None:
    shares = [0, 0]
    heard = 0

    async def first(_: Envelope) -> None:
        shares[0] += 1

    async def second(_: Envelope) -> None:
        shares[1] += 1

    async def listener(_: Envelope) -> None:
        nonlocal heard
        heard += 1

    await bus.subscribe("t.work", first, queue="crew")
    await other.subscribe("t.work", second, queue="crew")
    await other.subscribe("t.work", listener)
    await asyncio.gather(bus.flush(), other.flush())
    for _ in range(200):
        await bus.publish("t.work", Ping())
    await bus.flush()
    await asyncio.gather(bus.close(), other.close())
    assert sum(shares) == heard == 200
    assert min(shares) > 20


async def test_leaving_a_queue_group_loses_no_request(bus: MessageBus, other: MessageBus) -> None:
    answered = {"stays": 0, "leaves": 0}

    def member(connection: MessageBus, name: str) -> Receiver:
        async def receiver(envelope: Envelope) -> None:
            answered[name] += 1
            await connection.reply(envelope, Done())

        return receiver

    await bus.subscribe("t.group", member(bus, "stays"), queue="crew")
    leaving = await other.subscribe("t.group", member(other, "leaves"), queue="crew")
    await asyncio.gather(bus.flush(), other.flush())
    asking = []
    for number in range(600):
        asking.append(asyncio.create_task(bus.request("t.group", Ping(), deadline_s=now_s() + 5)))
        if number == 300:
            stopping = asyncio.create_task(leaving.stop())
        await asyncio.sleep(0)
    await stopping
    assert set(await asyncio.gather(*asking)) == {Done()}
    assert min(answered.values()) > 0
    assert sum(answered.values()) == 600


async def test_tokens_arrive_in_order(bus: MessageBus, other: MessageBus) -> None:
    received: list[Envelope] = []

    async def receiver(envelope: Envelope) -> None:
        received.append(envelope)

    await other.subscribe("t.tokens", receiver)
    await other.flush()
    sent = [
        Tokens(WorkerId("w"), 7, step, [Delta(1, 0, step, b"\x01\0\0\0")]) for step in range(300)
    ]
    for tokens in sent:
        await bus.publish("t.tokens", tokens)
    await bus.flush()
    await other.close()
    assert [envelope.message for envelope in received] == sent
    assert received[0].reply_to is None


async def test_oversized_message_is_refused_before_it_is_sent(bus: MessageBus) -> None:
    with pytest.raises(PayloadTooLarge):
        await bus.publish("t.big", Detokenized(text="x" * (5 * 1024 * 1024)))


async def test_limit_is_lowered_to_what_the_server_takes(
    bus_settings: BusSettings, caplog: pytest.LogCaptureFixture
) -> None:
    greedy = bus_settings.model_copy(update={"max_message_bytes": 64 * 1024 * 1024})
    bus = await connect(greedy, "greedy")
    with pytest.raises(PayloadTooLarge):
        await bus.publish("t.big", Detokenized(text="x" * (9 * 1024 * 1024)))
    assert bus.is_connected
    assert "limited" in caplog.text
    await bus.close()


async def test_slow_receiver_drops_counts_and_refuses(
    bus: MessageBus, bus_settings: BusSettings
) -> None:
    slow = await connect(bus_settings.model_copy(update={"pending_messages": 2}), "slow")
    release = asyncio.Event()

    async def receiver(envelope: Envelope) -> None:
        await release.wait()
        await slow.reply(envelope, Done())

    await slow.subscribe("t.slow", receiver)
    await slow.flush()
    asking = [
        asyncio.create_task(bus.request("t.slow", Ping(), deadline_s=soon())) for _ in range(10)
    ]
    done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
    assert isinstance(done.pop().exception(), Overloaded)
    release.set()
    results = await asyncio.gather(*asking, return_exceptions=True)
    dropped = slow.counts["slow consumer"]
    assert sum(isinstance(result, Overloaded) for result in results) == dropped > 0
    assert results.count(Done()) == 10 - dropped
    await slow.close()


async def test_failing_receiver_does_not_end_its_subscription(
    bus: MessageBus, other: MessageBus, caplog: pytest.LogCaptureFixture
) -> None:
    async def receiver(envelope: Envelope) -> None:
        if isinstance(envelope.message, Queued):
            raise RuntimeError("receiver is broken")
        await other.reply(envelope, Done())

    await other.subscribe("t.broken", receiver)
    await other.flush()
    await bus.publish("t.broken", Queued(position=1))
    assert await bus.request("t.broken", Ping(), deadline_s=soon()) == Done()
    assert "receiver is broken" in caplog.text


async def test_too_many_open_requests_are_refused(bus_settings: BusSettings) -> None:
    bus = await connect(bus_settings.model_copy(update={"max_inflight": 1}), "narrow")
    await answer_with(bus, "t.silent")
    first = asyncio.create_task(bus.request("t.silent", Ping(), deadline_s=now_s() + 0.2))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await bus.request("t.silent", Ping(), deadline_s=soon())
    with pytest.raises(DeadlineExceeded):
        await first
    await bus.close()


async def test_everything_goes_on_after_a_restart_of_the_server(
    start_nats: Callable[[], Server],
) -> None:
    server = start_nats()
    bus = await connect(bus_settings_of(server), "restarted")
    await answer_with(bus, "t.again", Done())
    server.stop()
    await until(lambda: not bus.is_connected)
    with pytest.raises(BusLost):
        await bus.request("t.again", Ping(), deadline_s=now_s() + 0.1)
    asked_while_away = asyncio.create_task(bus.request("t.again", Ping(), deadline_s=soon()))
    await asyncio.sleep(0)
    server.start()
    assert await asked_while_away == Done()
    assert await bus.request("t.again", Ping(), deadline_s=soon()) == Done()
    assert bus.counts["reconnected"] == 1
    await bus.close()


async def test_flush_that_is_cancelled_does_no_harm(bus: MessageBus, other: MessageBus) -> None:
    await answer_with(other, "t.calm", Done())
    flushing = [asyncio.create_task(bus.flush()) for _ in range(3)]
    await asyncio.sleep(0)
    for task in flushing:
        task.cancel()
    await asyncio.gather(*flushing, return_exceptions=True)
    assert await bus.request("t.calm", Ping(), deadline_s=soon()) == Done()
    await bus.flush()
    assert bus.counts == {}


async def test_sending_to_a_server_that_stopped_reading_can_be_cancelled(
    start_nats: Callable[[], Server],
) -> None:
    server = start_nats()
    changes = {"reconnect_buffer_bytes": 4096, "ping_interval_s": 60.0}
    bus = await connect(bus_settings_of(server).model_copy(update=changes), "stuck")
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    num_sent = 0

    async def send_for_ever() -> None:
        nonlocal num_sent
        while True:
            await bus.publish_raw("t.stuck", bytes(1 << 20))
            num_sent += 1

    sending = asyncio.create_task(send_for_ever())
    num_before = -1
    while num_sent > num_before:
        num_before = num_sent
        await asyncio.sleep(0.2)
    sending.cancel()
    await asyncio.wait((sending,), timeout=15.0)
    assert sending.cancelled()
    server.process.send_signal(signal.SIGCONT)
    await bus.close()


async def test_error_in_the_read_loop_reconnects(
    bus: MessageBus, other: MessageBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await answer_with(other, "t.calm", Done())
    take = FastClient.take

    async def fail_once(*_: object) -> None:
        monkeypatch.setattr(FastClient, "take", take)
        raise ZeroDivisionError

    monkeypatch.setattr(FastClient, "take", fail_once)
    with pytest.raises((DeadlineExceeded, BusLost)):
        await other.request("t.calm", Ping(), deadline_s=now_s() + 0.3)
    assert await other.request("t.calm", Ping(), deadline_s=soon()) == Done()
    assert other.counts["reconnected"] == 1


async def test_buffer_for_an_absent_server_is_bounded(start_nats: Callable[[], Server]) -> None:
    server = start_nats()
    settings = bus_settings_of(server).model_copy(
        update={"reconnect_buffer_bytes": 4096, "flush_timeout_s": 0.1}
    )
    bus = await connect(settings, "away")
    server.stop()
    await until(lambda: not bus.is_connected)
    message = Detokenized(text="x" * 1000)
    sent = await asyncio.gather(
        *(bus.publish("t.away", message) for _ in range(10)), return_exceptions=True
    )
    assert sent[0] is None
    assert isinstance(sent[-1], BusLost)
    with pytest.raises(BusLost):
        await bus.flush()
    await bus.close()


def test_leaving_while_the_server_is_away_is_clean(
    start_nats: Callable[[], Server],
) -> None:
    async def leave() -> None:
        server = start_nats()
        bus = await connect(bus_settings_of(server), "t")
        server.stop()
        await until(lambda: not bus.is_connected)
        await bus.publish_raw("t.unused", b"x")
        await bus.close()

    # As services do: its transports say in another way than asyncio's that they are closed.
    uvloop.run(leave())


async def test_absent_server_is_reported_with_its_address() -> None:
    settings = BusSettings(url=f"nats://127.0.0.1:{free_port()}", connect_deadline_s=0.2)
    with pytest.raises(BusLost, match=settings.url):
        await connect(settings, "lonely")


async def test_wrong_password_fails_at_once_and_does_not_show_it(
    bus_settings: BusSettings,
) -> None:
    wrong = bus_settings.model_copy(update={"password": SecretStr("wrong-secret")})
    started = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        await connect(wrong, "stranger")
    assert time.perf_counter() - started < IMMEDIATE_S
    assert "wrong-secret" not in caught.value.message


async def test_password_in_the_address_is_not_shown() -> None:
    port = free_port()
    url = f"nats://me:secret@127.0.0.1:{port},nats://me:p@ss@127.0.0.1:{port}"
    with pytest.raises(BusLost) as caught:
        await connect(BusSettings(url=url, connect_deadline_s=0.1), "lonely")
    shown = f"nats://127.0.0.1:{port},nats://127.0.0.1:{port}"
    assert caught.value.message.startswith(f"cannot reach NATS at {shown}: ")


async def test_subject_that_would_break_the_protocol_is_refused(bus: MessageBus) -> None:
    with pytest.raises(ProtocolError):
        await bus.publish("t.a b\r\nPUB x 0", Ping())
