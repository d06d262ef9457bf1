"""A bus whose server freezes, or is away while a subscription ends."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.servers import MAX_PAYLOAD_BYTES, Server, bus_settings_of
from tokenmesh.shared.bus.message_bus import MessageBus, connect
from tokenmesh.shared.bus.nats_frames import Packet
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.mesh import BusSettings
from tokenmesh.shared.errors import BusLost, NoResponders, PayloadTooLarge
from tokenmesh.shared.messages import Ping

Runner = Callable[[Coroutine[Any, Any, None]], None]

both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


def freeze(server: Server) -> None:
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)


def thaw(server: Server) -> None:
    assert server.process is not None
    server.process.send_signal(signal.SIGCONT)


def changed(settings: BusSettings, **changes: object) -> BusSettings:
    return settings.model_copy(update=changes)


async def collect(bus: MessageBus, subject: str) -> list[bytes]:
    """Collect what arrives on a subject; the list grows."""
    seen: list[bytes] = []

    async def receive(packet: Packet) -> None:
        seen.append(packet.data)

    await bus._link.subscribe(subject, receive, None)
    await bus.flush()
    return seen


@both_loops
def test_a_frozen_server_with_unread_data_is_left_for_another(
    start_nats: Callable[[], Server], run: Runner
) -> None:
    frozen, other = start_nats(), start_nats()
    config = Path(other.command[-1])
    config.write_text(config.read_text().replace(other.password, frozen.password))
    other.stop()
    other.start()

    async def main() -> None:
        urls = f"nats://127.0.0.1:{frozen.port},nats://127.0.0.1:{other.port}"
        settings = changed(bus_settings_of(frozen), ping_interval_s=0.5, connect_timeout_s=0.5)
        other.stop()
        bus = await connect(changed(settings, url=urls), "leaving")
        other.start()
        seen = await collect(bus, "t.on")
        freeze(frozen)
        for _ in range(12):
            await bus.publish_raw("t.unread", bytes(1 << 20))
        await until(lambda: bus.counts["reconnected"] >= 1)
        async with asyncio.timeout(30):
            while not seen:  # a starved machine may take the next server for a frozen one
                with suppress(BusLost):
                    await bus.publish_raw("t.on", b"again")
                await asyncio.sleep(0.05)
        await bus.close()
        await until(lambda: len(asyncio.all_tasks()) == 1)

    try:
        run(main())
    finally:
        thaw(frozen)


@both_loops
def test_closing_does_not_wait_for_a_frozen_server(
    start_nats: Callable[[], Server], run: Runner
) -> None:
    server = start_nats()

    async def main() -> None:
        settings = bus_settings_of(server)
        quick = changed(settings, ping_interval_s=600.0, drain_timeout_s=0.2, flush_timeout_s=0.2)
        bus = await connect(quick, "leaving")
        freeze(server)
        for _ in range(12):
            await bus.publish_raw("t.unread", bytes(1 << 20))
        async with asyncio.timeout(30):
            await bus.close()
        assert bus.counts["closed unflushed"] >= 1
        await until(lambda: len(asyncio.all_tasks()) == 1)

    try:
        run(main())
    finally:
        thaw(server)


@both_loops
def test_what_a_frozen_server_does_not_take_is_refused_and_the_rest_arrives_in_order(
    start_nats: Callable[[], Server], run: Runner
) -> None:
    server, limit, size = start_nats(), 1 << 20, 1 << 18

    async def main() -> None:
        settings = changed(bus_settings_of(server), ping_interval_s=600.0, flush_timeout_s=30.0)
        receiver = await connect(settings, "receiver")
        seen = await collect(receiver, "t.all")
        small = changed(settings, reconnect_buffer_bytes=limit, flush_timeout_s=0.2)
        sender = await connect(small, "sender")
        freeze(server)
        accepted: list[bytes] = []

        async def send_all() -> None:
            for number in range(1000):
                data = number.to_bytes(4, "big") + bytes(size)
                await sender.publish_raw("t.all", data)
                accepted.append(data)

        with pytest.raises(BusLost, match="does not read"):
            await send_all()
        rest = [b"%d" % number + bytes(size) for number in range(40)]
        outcomes = await asyncio.gather(
            *(sender.publish_raw("t.all", data) for data in rest), return_exceptions=True
        )
        accepted += [data for data, error in zip(rest, outcomes, strict=True) if error is None]
        assert sum(isinstance(error, BusLost) for error in outcomes) >= 30
        assert sender._link._client.pending_data_size <= limit + 2 * size
        thaw(server)
        await until(lambda: len(seen) >= len(accepted))
        assert seen == accepted
        await sender.publish_raw("t.all", b"on")
        await until(lambda: seen[-1] == b"on")
        await asyncio.gather(sender.close(), receiver.close())
        await until(lambda: len(asyncio.all_tasks()) == 1)

    try:
        run(main())
    finally:
        thaw(server)


async def test_a_subscription_left_while_the_server_is_away_hands_over_what_it_has(
    start_nats: Callable[[], Server],
) -> None:
    server = start_nats()
    bus = await connect(bus_settings_of(server), "leaving")
    release, seen = asyncio.Event(), list[bytes]()

    async def receive(packet: Packet) -> None:
        await release.wait()
        seen.append(packet.data)

    subscription = await bus._link.subscribe("t.left", receive, "group")
    for number in range(5):
        await bus.publish_raw("t.left", b"%d" % number)
    await bus.flush()
    server.stop()
    await until(lambda: not bus.is_connected)
    leaving = asyncio.create_task(subscription.stop())
    await asyncio.sleep(0)
    release.set()
    await leaving
    assert seen == [b"0", b"1", b"2", b"3", b"4"]
    server.start()
    await bus.flush()
    with pytest.raises(NoResponders):
        await bus.request("t.left", Ping(), deadline_s=now_s() + 30)
    await bus.close()


async def test_a_subscription_is_not_renewed_when_leaving_it_was_interrupted(
    start_nats: Callable[[], Server],
) -> None:
    """The connection ends between the UNSUB and its confirmation."""
    server = start_nats()
    bus = await connect(changed(bus_settings_of(server), drain_timeout_s=30.0), "leaving")

    async def receive(_packet: Packet) -> None: ...

    subscription = await bus._link.subscribe("t.left", receive, "group")
    await bus.flush()
    freeze(server)
    leaving = asyncio.create_task(subscription.stop())
    await asyncio.sleep(0)
    server.stop()
    server.start()
    await leaving
    await until(lambda: bus.counts["reconnected"] >= 1)
    with pytest.raises(NoResponders):
        await bus.request("t.left", Ping(), deadline_s=now_s() + 30)
    await bus.close()


async def test_a_flush_fails_with_its_connection_and_its_ping_is_not_sent_again(
    start_nats: Callable[[], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_nats()
    settings = changed(bus_settings_of(server), ping_interval_s=600.0, flush_timeout_s=30.0)
    bus = await connect(settings, "flushing")
    freeze(server)
    flushing = asyncio.create_task(bus.flush())
    await asyncio.sleep(0)
    server.stop()
    with pytest.raises(BusLost):
        await flushing
    await until(lambda: not bus.is_connected)
    client, num_pongs = bus._link._client, 0
    process = client._process_pong

    async def count() -> None:
        nonlocal num_pongs
        num_pongs += 1
        await process()

    monkeypatch.setattr(client, "_process_pong", count)
    await client._send_ping()
    server.start()
    await bus.flush()
    assert num_pongs == 2  # of the client's own flush after the reconnect, and of this one
    await bus.close()


async def test_headers_count_into_the_largest_payload(bus: MessageBus) -> None:
    link = bus._link
    fits = bytes(link.max_payload_bytes - len(b"NATS/1.0\r\na: b\r\n\r\n"))
    await link.send("t.big", fits, {"a": "b"})
    with pytest.raises(PayloadTooLarge):
        await link.send("t.big", fits + b"x", {"a": "b"})
    await bus.flush()
    assert bus.counts == {}


def lower_limit(server: Server) -> None:
    config = Path(server.command[-1])
    old = f"max_payload: {MAX_PAYLOAD_BYTES}"
    config.write_text(config.read_text().replace(old, "max_payload: 9000"))
    assert server.process is not None
    server.process.send_signal(signal.SIGHUP)


async def test_a_server_that_lowers_its_limit_refuses_one_message_and_no_process(
    start_nats: Callable[[], Server],
) -> None:
    server = start_nats()
    bus = await connect(bus_settings_of(server), "large")
    lower_limit(server)
    await until(lambda: b"Reloaded" in server.log.read_bytes())
    with suppress(BusLost, PayloadTooLarge):
        await bus.publish_raw("t.large", bytes(100_000))
        await bus.flush()
    await until(lambda: bus.is_connected and bus.max_message_bytes < 9000)
    with pytest.raises(PayloadTooLarge):
        await bus.publish_raw("t.large", bytes(100_000))
    await bus.flush()
    await bus.close()
