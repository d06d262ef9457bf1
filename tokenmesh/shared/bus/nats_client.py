"""nats-py with its faults corrected, and with the work of each message done at once.

What is overridden are private parts: hence the upper bound of nats-py in pyproject.
"""

import asyncio
from dataclasses import dataclass
from typing import Final, cast

import nats.errors
from nats.aio.client import PING_PROTO, Client
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

_CRLF: Final = b"\r\n"
_VERSION: Final = b"NATS/1.0\r\n"


@dataclass(slots=True)
class Packet:
    """A message as it was received."""

    subject: str
    reply: str
    """Empty when no answer is expected."""
    data: bytes
    headers: dict[str, str] | None


class FastClient(Client):
    """Faults of nats-py that are corrected here:

    - PING overtakes buffered commands, so the PONG of `flush` does not confirm an earlier SUB, and
      `drain` loses messages that the server sends before it has read the UNSUB.
    - The PONG of a cancelled flush ends the read loop.
    - When the read loop ends by its own error, the client does not reconnect.
    - For a `tls://` URL it sends the password to a server that claims to have no TLS, which an
      attacker on the way can claim.

    It also starts a task for each write and matches each message with expressions. Here the
    messages of one turn of the event loop are written together, and received ones are cut by
    their lengths.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ps = _FrameParser(self)
        self._will_write = False

    def _connect_command(self) -> bytes:
        scheme = self._current_server.uri.scheme if self._current_server else ""
        if scheme == "tls" and not self._server_info.get("tls_required"):
            raise nats.errors.SecureConnWantedError
        return super()._connect_command()

    async def _send_ping(self, future: "asyncio.Future[bool] | None" = None) -> None:
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        await self._send_command(PING_PROTO)
        await self._flush_pending()

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _read_loop(self) -> None:
        await super()._read_loop()
        if self.is_connected:
            await self._process_op_err(nats.errors.StaleConnectionError())

    def put(self, subject: str, payload: bytes, reply: str, headers: dict[str, str] | None) -> bool:
        """Publish without waiting. False: `publish` has to wait, or to refuse the message."""
        if (
            self._status != Client.CONNECTED
            or self._pending_data_size > self._max_pending_size
            or len(payload) > self._max_payload
            or not _is_subject(subject)
            or (reply and not _is_subject(reply))
            or (headers and not all(map(str.isprintable, headers.values())))
        ):
            return False
        size = len(payload)
        if headers is None:
            data = b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply.encode(), size, payload)
        else:
            lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
            head = f"NATS/1.0\r\n{''.join(lines)}\r\n".encode()
            sizes = f"{len(head)} {len(head) + size}"
            data = f"HPUB {subject} {reply} {sizes}\r\n".encode() + head + payload + _CRLF
        self._pending.append(data)
        self._pending_data_size += len(data)
        self._write_soon()
        return True

    async def _flush_pending(self, force_flush: bool = False) -> object:
        """Write at the end of this turn of the event loop. nats-py's own task does it where a
        caller waits for the write."""
        if force_flush or not self.is_connected:
            return await super()._flush_pending(force_flush)
        self._write_soon()
        return None

    def _write_soon(self) -> None:
        if not self._will_write:
            self._will_write = True
            asyncio.get_running_loop().call_soon(self._write_pending)

    def _write_pending(self) -> None:
        self._will_write = False
        if not self._pending or not self.is_connected:
            return  # after a reconnect the client flushes by itself
        writer = self._transport._io_writer if isinstance(self._transport, TcpTransport) else None
        if writer is None or writer.transport.get_write_buffer_size():
            # The server reads slowly: the task waits for it, and callers for the task.
            if self._flush_queue is not None and self._flush_queue.empty():
                self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())
            return
        try:
            writer.write(b"".join(self._pending))
        except (OSError, RuntimeError):
            return  # closed: the read loop finds that, and what is pending is sent again
        self._pending = []
        self._pending_data_size = 0

    async def take(
        self, subject: bytes, sid: int, reply: bytes, head: bytes, payload: bytes
    ) -> None:
        """Hand a received message over to its subscription; `head`: its headers as received."""
        found = self._subs.get(sid)
        if found is None:
            return
        headers = None
        if head:
            headers = _headers(head) or await self._process_headers(head)
        message = Packet(subject.decode(), reply.decode(), payload, headers)
        limit = found._pending_bytes_limit
        if found._pending_queue.full() or 0 < limit <= found._pending_size + len(payload):
            dropped = nats.errors.SlowConsumerError(message.subject, message.reply, sid, found)
            await self._error_cb(dropped)
            return
        found._pending_size += len(payload)
        # nats-py's own loop hands it to the callback; all that it reads of a message is `data`
        found._pending_queue.put_nowait(cast("Msg", message))


class _FrameParser(Parser):
    """Cuts messages out of what was received; everything else goes the way of nats-py."""

    def __init__(self, client: FastClient) -> None:
        super().__init__(client)
        self._client = client

    async def parse(self, data: bytes = b"") -> None:
        if self.buf and self.state == AWAITING_CONTROL_LINE:
            data = bytes(self.buf) + data
            self.buf.clear()
        start = 0
        while not self.buf and (data.startswith((b"MSG ", b"HMSG "), start)):
            line_end = data.find(_CRLF, start)
            if line_end < 0:
                break
            words = data[start:line_end].split()
            has_head = words[0] == b"HMSG"
            try:
                num_bytes, num_head = int(words[-1]), int(words[-2]) if has_head else 0
                sid = int(words[2])
            except (ValueError, IndexError) as error:
                raise nats.errors.ProtocolError("malformed MSG") from error
            begin = line_end + len(_CRLF)
            end = begin + num_bytes
            if end + len(_CRLF) > len(data):
                break
            # a reply subject stands between the subscription and the sizes
            reply = words[3] if len(words) == 5 + has_head else b""
            head, payload = data[begin : begin + num_head], data[begin + num_head : end]
            await self._client.take(words[1], sid, reply, head, payload)
            start = end + len(_CRLF)
        if start < len(data):
            await super().parse(data[start:] if start else data)


def _headers(head: bytes) -> dict[str, str] | None:
    """The headers of a block as `put` writes it; None: it has another form."""
    if not head.startswith(_VERSION):
        return None
    try:
        lines = head[len(_VERSION) :].decode().split("\r\n")
        pairs = [line.split(":", 1) for line in lines if line]
        return {name: value.strip() for name, value in pairs}
    except ValueError:
        return None


def _is_subject(text: str) -> bool:
    """Whether it has no space or line break, which would end it in a command."""
    return text.isprintable() and " " not in text and bool(text)
