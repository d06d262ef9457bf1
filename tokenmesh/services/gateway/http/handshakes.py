"""Handshakes: TLS connections that are not yet one, bounded in number and time.

TLS begins with the client's first bytes: a connection that stays silent costs a socket only. When
too many are under way the oldest silent one is closed, and the oldest of all where none is silent:
an honest client's is over within a few round trips.
"""

import asyncio
import ssl
from typing import cast

from tokenmesh.shared.bus.base import RateLimitedLog
from tokenmesh.shared.config.http import ListenerSettings

_UNFINISHED = "unfinished handshake"


class Handshakes:
    """Those of one server."""

    def __init__(
        self, context: ssl.SSLContext, limits: ListenerSettings, complaints: RateLimitedLog
    ) -> None:
        self.context = context
        self.limits = limits
        self._complaints = complaints
        self._silent: dict[_Handshake, None] = {}
        """In their order, as the others."""
        self._running: dict[_Handshake, None] = {}

    def __len__(self) -> int:
        return len(self._silent) + len(self._running)

    def before(self, protocol: asyncio.Protocol) -> asyncio.Protocol:
        """What accepts a connection whose protocol begins after the handshake."""
        return _Handshake(self, protocol)

    def accept(self, handshake: "_Handshake") -> None:
        """Make room for one more."""
        while len(self) >= self.limits.max_handshakes:
            self.fail(next(iter(self._silent or self._running)))
        self._silent[handshake] = None

    def begin(self, handshake: "_Handshake") -> None:
        """Its first bytes have come."""
        del self._silent[handshake]
        self._running[handshake] = None

    def end(self, handshake: "_Handshake") -> None:
        """It is over."""
        self._silent.pop(handshake, None)
        self._running.pop(handshake, None)

    def fail(self, handshake: "_Handshake") -> None:
        """Give one up."""
        self.end(handshake)
        self._complaints.note(_UNFINISHED, f"from {handshake.client}")
        handshake.abort()

    def stop(self) -> None:
        """Give all up: the server leaves."""
        for handshake in (*self._silent, *self._running):
            self.end(handshake)
            handshake.abort()


class _Handshake(asyncio.Protocol):
    """One: the protocol of the plain connection, and of the encrypted one until that is ready."""

    def __init__(self, owner: Handshakes, protocol: asyncio.Protocol) -> None:
        self._owner = owner
        self._protocol = protocol
        self._early = bytearray()
        """Decrypted bytes that came together with the end of the handshake."""
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self.client: object = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio; called for the plain connection only."""
        self._transport = cast("asyncio.Transport", transport)
        self.client = transport.get_extra_info("peername")
        self._owner.accept(self)
        limit_s = self._owner.limits.handshake_timeout_s
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._owner.fail, self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio; called for the plain connection while it is silent."""
        self._stop_timer()
        self._owner.end(self)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self._task is not None:
            self._early += data
        elif self._transport is not None and not self._transport.is_closing():
            self._owner.begin(self)
            # All that follows is the encrypted connection's.
            self._transport.pause_reading()
            self._task = asyncio.get_running_loop().create_task(self._run(self._transport, data))

    def abort(self) -> None:
        """Close at once."""
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()
        if self._task is not None:
            self._task.cancel()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def _run(self, plain: asyncio.Transport, first: bytes) -> None:
        loop = asyncio.get_running_loop()
        # `start_tls` calls `connection_made` soon: the first bytes come right behind that.
        loop.call_soon(loop.call_soon, _feed, plain, first)
        try:
            encrypted = await loop.start_tls(
                plain,
                self,
                self._owner.context,
                server_side=True,
                ssl_handshake_timeout=self._owner.limits.handshake_timeout_s,
            )
        except (OSError, ssl.SSLError):
            self._owner.fail(self)
            return
        self._stop_timer()
        self._owner.end(self)
        if encrypted is None or encrypted.is_closing():
            plain.abort()
            return
        encrypted.set_protocol(self._protocol)
        self._protocol.connection_made(encrypted)
        if self._early:
            self._protocol.data_received(bytes(self._early))


def _feed(plain: asyncio.Transport, data: bytes) -> None:
    """Hand bytes to the protocol of TLS as its transport would."""
    protocol = cast("asyncio.BufferedProtocol", plain.get_protocol())
    while data and not plain.is_closing():
        room = memoryview(protocol.get_buffer(len(data)))
        part = data[: len(room)]
        room[: len(part)] = part
        protocol.buffer_updated(len(part))
        data = data[len(part) :]
