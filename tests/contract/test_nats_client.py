"""What arrives on a connection to NATS, as messages."""

import asyncio

import nats.errors
import pytest

from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.bus.nats_client import Packet


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


@pytest.mark.parametrize("frame", [b"MSG t.cut 1\r\n", b"HMSG t.cut x 1 2\r\n", b"MSG a b c d\r\n"])
async def test_a_malformed_message_is_an_error_of_the_protocol(
    bus: MessageBus, frame: bytes
) -> None:
    with pytest.raises(nats.errors.ProtocolError):
        await bus._link._client._ps.parse(frame)
