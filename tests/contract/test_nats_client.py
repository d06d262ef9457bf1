"""A connection to NATS reads messages, whatever cuts them, and notices nonsense."""

import asyncio
import hashlib
import inspect
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import nats.aio.client
import nats.aio.subscription
import nats.aio.transport
import pytest

from tests.contract.test_bus_outages import Runner, both_loops, changed, collect, until
from tests.servers import Server, bus_settings_of
from tokenmesh.shared.bus.message_bus import MessageBus, connect
from tokenmesh.shared.bus.nats_client import FastClient
from tokenmesh.shared.bus.nats_frames import Packet
from tokenmesh.shared.config.mesh import BusSettings


async def test_messages_arrive_whole_however_the_connection_cuts_them(bus: MessageBus) -> None:
    """Fed byte by byte, in parts and all at once, with other commands between them."""
    client, seen = bus._link._client, list[tuple[str, str, bytes, dict[str, str] | None]]()

    async def receive(packet: Packet) -> None:
        seen.append((packet.subject, packet.reply, packet.data, packet.headers))

    await bus._link.subscribe("t.cut", receive, None)
    sid = client._sid
    head = b"NATS/1.0\r\ntm-sent: 1.5\r\nOdd:  v \r\n\r\n"
    status = b"NATS/1.0 503\r\n\r\n"
    frames = (
        b"MSG t.cut %d 6\r\nMSG \r\n\r\n" % sid
        + b"MSG t.cut %d re.ply 0\r\n\r\n" % sid
        + b"PING\r\n+OK\r\n"
        + b"HMSG t.cut %d re.ply %d %d\r\n%bab\r\n" % (sid, len(head), len(head) + 2, head)
        + b"HMSG t.cut %d %d %d\r\n%b\r\n" % (sid, len(status), len(status), status)
        + b"MSG t.cut 999 2\r\nno\r\n"
    )
    expected = [
        ("t.cut", "", b"MSG \r\n", None),
        ("t.cut", "re.ply", b"", None),
        ("t.cut", "re.ply", b"ab", {"tm-sent": "1.5", "Odd": "v"}),
        ("t.cut", "", b"", {"Status": "503"}),
    ]
    for size in (1, 2, 7, 40, len(frames), 3 * len(frames)):
        seen.clear()
        data = frames * 3
        for start in range(0, len(data), size):
            await client._ps.parse(data[start : start + size])
        async with asyncio.timeout(15):
            while len(seen) < 12:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.005)
        assert seen == expected * 3, size


HELLO = b'INFO {"max_payload": 1048576, "headers": true}\r\n'


@asynccontextmanager
async def scripted(
    openings: Sequence[tuple[bytes, bytes]],
) -> AsyncIterator[tuple[BusSettings, set[asyncio.StreamWriter]]]:
    """A server that says on each next connection one of the pairs: at once, and after the first
    PING. It ends a connection after a text without PONG. The last pair is used again and again.
    Yields settings and the connections that are open."""
    num_connections, writers = 0, set[asyncio.StreamWriter]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        hello, answer = openings[min(num_connections, len(openings) - 1)]
        num_connections += 1
        writers.add(writer)
        writer.write(hello)
        try:
            while line := await reader.readline():
                if line == b"PING\r\n":
                    writer.write(answer)
                    answer = b"PONG\r\n"
        except ConnectionError:
            pass
        finally:
            writers.discard(writer)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield (
        BusSettings(
            url=f"nats://127.0.0.1:{port}",
            reconnect_min_s=0.001,
            reconnect_max_s=0.002,
            connect_timeout_s=30.0,
            ping_interval_s=600.0,
        ),
        writers,
    )
    server.close()
    await server.wait_closed()


GOOD = (HELLO, b"PONG\r\n")


@both_loops
@pytest.mark.parametrize(
    "nonsense",
    [
        (b"INFO\r\n", b""),
        (b"INFO {]\r\n", b""),
        (b"INFO []\r\n", b""),
        (b"SSH-2.0-x\r\n", b""),
        (b"x" * 100_000, b""),
        (HELLO, b"INFO {}\r\n"),
        (HELLO, b"-ERR 'maximum connections exceeded'\r\n"),
    ],
)
def test_a_reconnect_goes_on_after_nonsense(nonsense: tuple[bytes, bytes], run: Runner) -> None:
    async def main() -> None:
        end = (HELLO, b"PONG\r\nMSG a 1 -14\r\n")
        async with scripted([GOOD, nonsense, end, nonsense, GOOD]) as (settings, writers):
            bus = await connect(settings, "patient")
            num_tasks = len(asyncio.all_tasks())
            next(iter(writers)).transport.abort()
            await until(lambda: bus.is_connected and bus.counts["disconnected"] >= 2)
            await bus.flush()
            await until(lambda: len(writers) == 1)
            await until(lambda: len(asyncio.all_tasks()) <= num_tasks)
            await bus.close()
            await until(lambda: not writers)

    run(main())


async def test_malformed_bytes_are_reported_and_end_the_connection() -> None:
    bad = (HELLO, b"PONG\r\n" * 6 + b"MSG a 1 9999999999\r\n")
    async with scripted([bad, GOOD]) as (settings, _writers):
        bus = await connect(settings, "robust")
        await until(lambda: bus.counts["reconnected"] >= 1)
        assert bus.counts["connection"] >= 1
        await bus.flush()
        await bus.close()


async def test_a_message_that_is_cut_off_is_not_handed_over(
    start_nats: Callable[[], Server],
) -> None:
    """Through a proxy that ends the connection at each byte of a message once."""
    server, message = start_nats(), b"MSG t.cut "
    allowed: list[int] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", server.port)

        async def forward() -> None:
            while data := await reader.read(4096):
                to_server.write(data)
            to_server.close()

        forwarding = asyncio.create_task(forward())
        while data := await from_server.read(4096):
            begin = data.find(message)
            if begin >= 0 and allowed:
                writer.write(data[: begin + allowed.pop()])
                await writer.drain()
                break
            writer.write(data)
        writer.close()
        to_server.close()
        forwarding.cancel()

    proxy = await asyncio.start_server(relay, "127.0.0.1", 0)
    settings = bus_settings_of(server)
    port = proxy.sockets[0].getsockname()[1]
    bus = await connect(changed(settings, url=f"nats://127.0.0.1:{port}"), "cut")
    sender = await connect(settings, "sender")
    seen, frame = await collect(bus, "t.cut"), b"MSG t.cut 3 4\r\nMSG \r\n"
    for num_bytes in range(1, len(frame)):
        allowed.append(num_bytes)
        await sender.publish_raw("t.cut", b"MSG ")
        await until(lambda n=num_bytes: bus.counts["reconnected"] == n)  # type: ignore[misc]
        await bus.flush()
        assert seen == []
    await sender.publish_raw("t.cut", b"whole")
    await until(lambda: seen == [b"whole"])
    await asyncio.gather(bus.close(), sender.close())
    proxy.close()


PRIVATE = {
    nats.aio.client.Client: (
        "_attempt_reconnect _close _connect_command _connect_to_server _flusher _ping_interval "
        "_process_connect_init _process_err _process_info _process_op_err _process_pong "
        "_read_loop _remove_sub _select_next_server _send_subscribe _send_unsubscribe connect "
        "subscribe"
    ),
    nats.aio.subscription.Subscription: "__init__ _start _stop_processing _wait_for_msgs",
    nats.aio.transport.TcpTransport: "connect connect_tls drain close wait_closed",
}


def test_private_parts_of_nats_py_are_those_that_were_read() -> None:
    """`nats_client.py` overrides and relies on them. Where this fails: compare the new nats-py with
    2.16.0, correct `FastClient`, run the tests of the bus, then change the sums."""
    sums = {
        f"{owner.__name__}.{name}": hashlib.sha256(
            inspect.getsource(getattr(owner, name)).encode()
        ).hexdigest()[:12]
        for owner, names in PRIVATE.items()
        for name in names.split()
    }
    known = json.loads((Path(__file__).parent / "nats_py_sums.json").read_text())
    assert sums == known


def test_what_is_overridden_exists_in_nats_py() -> None:
    own = {"put", "take", "report", "leave", "abort", "drop_pending", "wait_for_room"}
    own |= {"_leave_server", "_write_soon", "_write_pending"}
    methods = {name for name, each in vars(FastClient).items() if inspect.isfunction(each)}
    assert methods - own <= set(vars(nats.aio.client.Client))
    assert not own & set(vars(nats.aio.client.Client))
