"""nats-py with its faults corrected, and with the work of each message done at once.

What is overridden are private parts, those of one minor version (pyproject;
`tests/contract/test_nats_client.py` fails when they change).
"""

import asyncio
from collections.abc import Awaitable
from typing import Any, Final, cast

import nats.errors
from nats.aio.client import PING_PROTO, Client, Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.protocol.parser import Parser

from tokenmesh.shared.bus.nats_frames import FrameParser, MalformedFrame, Packet, headers_of

_CRLF: Final = b"\r\n"


class FastClient(Client):
    """Faults of nats-py that are corrected here:

    - PING overtakes buffered commands, so the PONG of `flush` does not confirm an earlier SUB, and
      `drain` loses messages that the server sends before it has read the UNSUB.
    - The PONG of a cancelled flush ends the read loop; a flush whose connection is lost succeeds.
    - When the read loop ends by its own error, the client does not reconnect; nor when an attempt
      ends by an error that it does not expect. An attempt that fails leaves its connection open.
    - A server that has stopped reading holds up the reconnect to another one, and `close`, until
      it reads on. Senders wait for it, then add to a buffer without a bound.
    - Waiting for it swallows cancellations.
    - A subscription that ends while the server is away forgets what it has received.
    - For a `tls://` URL it sends the password to a server that claims to have no TLS, which an
      attacker on the way can claim.

    It also starts a task for each write and matches each message with expressions. Here the
    messages of one turn of the event loop are written together, and received ones are cut by
    their lengths.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ps = cast("Parser", FrameParser(self))
        self._will_write = False

    def _connect_command(self) -> bytes:
        scheme = self._current_server.uri.scheme if self._current_server else ""
        if scheme == "tls" and not self._server_info.get("tls_required"):
            raise nats.errors.SecureConnWantedError
        return super()._connect_command()

    async def _connect_to_server(self, s: Srv) -> None:
        self._leave_server()
        await super()._connect_to_server(s)

    async def _process_connect_init(self) -> None:
        try:
            await super()._process_connect_init()
        except (OSError, nats.errors.Error, TimeoutError):
            raise
        # Whatever a server says at first, or uvloop to a write after the end, is tried again.
        except Exception as error:
            raise nats.errors.Error(f"nats: no connection: {error!r}") from error
        # their PONGs would be taken for those of later ones
        kept = [each for each in self._pending if each is not PING_PROTO]
        self._pending_data_size -= (len(self._pending) - len(kept)) * len(PING_PROTO)
        self._pending = kept
        if not self.is_connected:
            raise nats.errors.Error("nats: the server did not answer PING")

    def _leave_server(self) -> None:
        """End a connection and its tasks at once: the server may have stopped reading."""
        for task in (self._reading_task, self._ping_interval_task, self._flusher_task):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        if isinstance(self._transport, TcpTransport) and self._transport._io_writer is not None:
            self._transport._io_writer.transport.abort()
        pongs, self._pongs = self._pongs, []
        for pong in pongs:
            if not pong.done():
                pong.set_exception(nats.errors.StaleConnectionError())
                pong.exception()  # not every one is awaited

    async def _attempt_reconnect(self) -> None:
        while True:
            self._leave_server()
            try:
                return await super()._attempt_reconnect()
            # such as uvloop's RuntimeError for a write to a connection that has just ended
            except Exception as error:
                if self.is_closed:
                    return None
                self._status = Client.RECONNECTING
                if self._current_server is not None:
                    self._current_server.reconnects += 1
                await self._error_cb(nats.errors.Error(f"nats: no connection: {error!r}"))

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        self._write_pending()
        self.drop_pending()
        await super()._close(status, do_cbs)

    def abort(self) -> int:
        """Before `close`: do not wait for the server. Returns the bytes that were not sent."""
        self._leave_server()
        return self.drop_pending()

    def drop_pending(self) -> int:
        num_bytes, self._pending_data_size = self._pending_data_size, 0
        self._pending = []
        return num_bytes

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        self._max_payload = info.get("max_payload", self._max_payload)
        await super()._process_info(info, initial_connection)

    async def _process_err(self, err_msg: str) -> None:
        """The limit of a message was lowered: the next connection tells the new one."""
        if "maximum payload" in err_msg:
            error = nats.errors.MaxPayloadError()
            await self._error_cb(error)
            await self._process_op_err(error)
        else:
            await super()._process_err(err_msg)

    async def _send_ping(self, future: "asyncio.Future[bool] | None" = None) -> None:
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        await self._send_command(PING_PROTO)

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def flush(self, timeout: float = 10.0) -> None:
        """Raises nats-py's Error when the server is away, or goes away before it answers."""
        if not self.is_connected:
            raise nats.errors.ConnectionReconnectingError
        pong = asyncio.get_running_loop().create_future()
        await self._send_ping(pong)
        async with asyncio.timeout(timeout):
            await pong

    async def _read_loop(self) -> None:
        await super()._read_loop()
        task = asyncio.current_task()
        if self.is_connected and task is not None and not task.cancelling():
            await self._process_op_err(nats.errors.StaleConnectionError())

    def put(self, subject: str, payload: bytes, reply: str, headers: dict[str, str] | None) -> bool:
        """Publish without waiting, or buffer while the server is away.

        False: the server reads too slowly; `wait_for_room`. Raises nats-py's errors.
        """
        if not _is_subject(subject) or (reply and not _is_subject(reply)):
            raise nats.errors.BadSubjectError
        if headers is None:
            head = b""
        else:
            lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
            if not all(map(str.isprintable, headers.values())):
                raise nats.errors.BadHeaderError(str(headers))
            head = f"NATS/1.0\r\n{''.join(lines)}\r\n".encode()
        size = len(head) + len(payload)
        if size > self._max_payload:
            raise nats.errors.MaxPayloadError
        if self._status == Client.CONNECTED:
            if self._pending_data_size > self._max_pending_size:
                return False
        elif self.is_closed:
            raise nats.errors.ConnectionClosedError
        elif self._pending_data_size + size > self._max_pending_size:
            raise nats.errors.OutboundBufferLimitError
        if head:
            command = f"HPUB {subject} {reply} {len(head)} {size}\r\n".encode()
            data = b"%b%b%b\r\n" % (command, head, payload)
        else:
            data = b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply.encode(), size, payload)
        self._pending.append(data)
        self._pending_data_size += len(data)
        self._write_soon()
        return True

    async def wait_for_room(self) -> None:
        """Wait until the server has read what was pending; the caller bounds the time."""
        assert self._flush_queue is not None
        written = asyncio.get_running_loop().create_future()
        await self._flush_queue.put(written)
        await written

    async def _send_command(self, cmd: bytes, priority: bool = False) -> None:
        """nats-py waits here where much is pending, and so do its loops; only senders shall."""
        self._pending.insert(0 if priority else len(self._pending), cmd)
        self._pending_data_size += len(cmd)
        self._write_soon()

    async def _flush_pending(self, force_flush: bool = False) -> None:
        self._write_soon()

    def _write_soon(self) -> None:
        """Write at the end of this turn of the event loop. nats-py's own task writes where the
        server reads slowly."""
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
        self.drop_pending()

    async def _flusher(self) -> None:
        """Write what is pending whenever the server has read most of what was written before."""
        assert self._flush_queue is not None
        assert self._transport is not None
        while self.is_connected:
            written = await self._flush_queue.get()
            try:
                if self._pending:
                    self._transport.write(b"".join(self._pending))
                    self.drop_pending()
                if not written.done():
                    written.set_result(None)  # now there is room again
                await self._transport.drain()  # type: ignore[no-untyped-call]
            except (OSError, RuntimeError) as error:
                await self._process_op_err(error)
                return
            finally:
                if not written.done():
                    written.set_result(None)

    def take(
        self, subject: bytes, sid: int, reply: bytes, head: bytes, payload: bytes
    ) -> Awaitable[None] | None:
        found = self._subs.get(sid)
        if found is None:
            return None
        headers = headers_of(head) if head else None
        # a peer may have written any bytes
        message = Packet(
            subject.decode(errors="replace"), reply.decode(errors="replace"), payload, headers
        )
        limit = found._pending_bytes_limit
        if found._pending_queue.full() or 0 < limit <= found._pending_size + len(payload):
            dropped = nats.errors.SlowConsumerError(message.subject, message.reply, sid, found)
            return self._error_cb(dropped)
        found._pending_size += len(payload)
        # nats-py's own loop hands it to the callback; all that it reads of a message is `data`
        found._pending_queue.put_nowait(cast("Msg", message))
        return None

    async def report(self, error: MalformedFrame) -> None:
        await self._error_cb(error)

    async def leave(self, subscription: Subscription) -> None:
        """End a subscription; returns when what was received on it has been handed over."""
        try:
            try:
                if not self.is_closed:
                    await self._send_unsubscribe(subscription._id)
                await self.flush()
            except (nats.errors.Error, TimeoutError):
                pass  # what the server had not sent is lost with the connection
            finally:
                # now nothing more is received, and a reconnect does not subscribe again
                self._remove_sub(subscription._id)
            await subscription._pending_queue.join()
        finally:
            subscription._stop_processing()


def _is_subject(text: str) -> bool:
    """Return whether it has no space or line break, which would end it in a command."""
    return text.isprintable() and " " not in text and bool(text)
