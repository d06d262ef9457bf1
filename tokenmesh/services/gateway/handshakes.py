"""Handshakes: TLS connections that are not yet one, bounded in number and time.

A silent connection costs some 50 KB once its handshake has begun. When too many are under way the
oldest is closed: that of an honest client is over within a few round trips.
"""

import asyncio
import ssl
from typing import cast

from tokenmesh.shared.bus.complaints import Complaints
from tokenmesh.shared.config.listener import ListenerSettings

_UNFINISHED = "unfinished handshake"


class Handshakes:
    """Those of one server."""

    def __init__(
        self, context: ssl.SSLContext, limits: ListenerSettings, complaints: Complaints
    ) -> None:
        self.context = context
        self.limits = limits
        self._complaints = complaints
        self._running: dict[_Handshake, None] = {}
        """In their order."""

    def __len__(self) -> int:
        return len(self._running)

    def before(self, protocol: asyncio.Protocol) -> asyncio.Protocol:
        """What accepts a connection whose protocol begins after the handshake."""
        return _Handshake(self, protocol)

    def begin(self, handshake: "_Handshake") -> None:
        """Make room for one more."""
        while len(self._running) >= self.limits.max_handshakes:
            self.fail(next(iter(self._running)))
        self._running[handshake] = None

    def end(self, handshake: "_Handshake") -> None:
        """It is over."""
        self._running.pop(handshake, None)

    def fail(self, handshake: "_Handshake") -> None:
        """Give one up."""
        self.end(handshake)
        self._complaints.note(_UNFINISHED, f"from {handshake.client}")
        handshake.abort()

    def stop(self) -> None:
        """Give all up: the server leaves."""
        for handshake in tuple(self._running):
            self.end(handshake)
            handshake.abort()


class _Handshake(asyncio.Protocol):
    """One: the protocol of the plain connection, and of the encrypted one until that is ready."""

    def __init__(self, owner: Handshakes, protocol: asyncio.Protocol) -> None:
        self._owner = owner
        self._protocol = protocol
        self._early = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self.client: object = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio; called for the plain connection only."""
        self._transport = cast("asyncio.Transport", transport)
        self.client = transport.get_extra_info("peername")
        self._owner.begin(self)
        self._task = asyncio.get_running_loop().create_task(self._run(self._transport))

    def data_received(self, data: bytes) -> None:
        """See asyncio: what came together with the end of the handshake."""
        self._early += data

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()
        if self._task is not None:
            self._task.cancel()

    async def _run(self, plain: asyncio.Transport) -> None:
        limits = self._owner.limits
        try:
            encrypted = await asyncio.get_running_loop().start_tls(
                plain,
                self,
                self._owner.context,
                server_side=True,
                ssl_handshake_timeout=limits.handshake_timeout_s,
            )
        except (OSError, ssl.SSLError):
            self._owner.fail(self)
            return
        self._owner.end(self)
        if encrypted is None or encrypted.is_closing():
            plain.abort()
            return
        encrypted.set_protocol(self._protocol)
        self._protocol.connection_made(encrypted)
        if self._early:
            self._protocol.data_received(bytes(self._early))
