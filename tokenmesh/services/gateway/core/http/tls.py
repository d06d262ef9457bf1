"""HTTPS: a certificate that is read again when its files change, and bounds on TLS handshakes.

TLS begins with the client's first bytes: a connection that stays silent costs only a socket. When
too many handshakes are open, the oldest silent one is closed, or the oldest of all where none is
silent: an honest client completes its handshake within a few round trips.
"""

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Final, cast

from tokenmesh.shared.bus.base import RateLimitedLog
from tokenmesh.shared.config.http import ListenerSettings
from tokenmesh.shared.errors import ConfigError

logger = logging.getLogger(__name__)

_UNFINISHED: Final = "unfinished handshake"


class Certificate:
    """The TLS context of one server, and the files it came from."""

    def __init__(self, certfile: Path, settings: ListenerSettings) -> None:
        """Raises ConfigError when the files cannot be used."""
        self._certfile = certfile
        self._keyfile = settings.ssl_keyfile
        self._refresh_s = settings.ssl_refresh_s
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            self._load()
            if settings.ssl_ca_certs is not None:
                self.context.verify_mode = ssl.CERT_REQUIRED
                self.context.load_verify_locations(settings.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"cannot use the certificate {certfile}: {error}", param="gateway.ssl_certfile"
            ) from error

    def _load(self) -> None:
        self._seen = self._stamps()
        self.context.load_cert_chain(self._certfile, self._keyfile)

    def _stamps(self) -> tuple[float, ...]:
        files = [self._certfile] + ([self._keyfile] if self._keyfile is not None else [])
        return tuple(file.stat().st_mtime for file in files)

    async def refresh(self) -> None:
        """Check the files repeatedly; later connections get the new certificate."""
        while self._refresh_s:
            await asyncio.sleep(self._refresh_s)
            self.reload()

    def reload(self) -> None:
        """Read the files again when they have changed; broken files leave the old ones in use."""
        try:
            if self._stamps() != self._seen:
                self._load()
                logger.info("using the new certificate %s", self._certfile)
        except (OSError, ssl.SSLError) as error:
            logger.error("cannot use the new certificate %s: %s", self._certfile, error)


class Handshakes:
    """The open handshakes of one server."""

    def __init__(
        self, context: ssl.SSLContext, limits: ListenerSettings, complaints: RateLimitedLog
    ) -> None:
        self.context = context
        self.limits = limits
        self._complaints = complaints
        self._silent: dict[_Handshake, None] = {}
        """Without a byte yet, in order of arrival."""
        self._running: dict[_Handshake, None] = {}

    def __len__(self) -> int:
        return len(self._silent) + len(self._running)

    def before(self, protocol: asyncio.Protocol) -> asyncio.Protocol:
        """A protocol that makes the handshake and then hands the connection to `protocol`."""
        return _Handshake(self, protocol)

    def accept(self, handshake: "_Handshake") -> None:
        """Count a new connection; closes another one at the limit."""
        while len(self) >= self.limits.max_handshakes:
            self.fail(next(iter(self._silent or self._running)))
        self._silent[handshake] = None

    def begin(self, handshake: "_Handshake") -> None:
        """The first bytes of the handshake have arrived."""
        del self._silent[handshake]
        self._running[handshake] = None

    def end(self, handshake: "_Handshake") -> None:
        self._silent.pop(handshake, None)
        self._running.pop(handshake, None)

    def fail(self, handshake: "_Handshake") -> None:
        """Close the connection and log it."""
        self.end(handshake)
        self._complaints.note(_UNFINISHED, f"from {handshake.client}")
        handshake.abort()

    def stop(self) -> None:
        """Close all: the server stops."""
        for handshake in (*self._silent, *self._running):
            self.end(handshake)
            handshake.abort()


class _Handshake(asyncio.Protocol):
    """The protocol of the plain connection, and of the encrypted one until that is ready."""

    def __init__(self, owner: Handshakes, protocol: asyncio.Protocol) -> None:
        self._owner = owner
        self._protocol = protocol
        self._early = bytearray()
        """Decrypted bytes that arrived with the end of the handshake."""
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self.client: object = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.client = transport.get_extra_info("peername")
        self._owner.accept(self)
        limit_s = self._owner.limits.handshake_timeout_s
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._owner.fail, self)

    def connection_lost(self, exc: Exception | None) -> None:
        # Called for the plain connection while it is silent.
        self._stop_timer()
        self._owner.end(self)

    def data_received(self, data: bytes) -> None:
        if self._task is not None:
            self._early += data
        elif self._transport is not None and not self._transport.is_closing():
            self._owner.begin(self)
            # The encrypted connection reads the rest.
            self._transport.pause_reading()
            self._task = asyncio.get_running_loop().create_task(self._run(self._transport, data))

    def abort(self) -> None:
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
        # `start_tls` schedules `connection_made`: feed the first bytes right after it.
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
    """Pass bytes to the TLS protocol as its transport would."""
    protocol = cast("asyncio.BufferedProtocol", plain.get_protocol())
    while data and not plain.is_closing():
        room = memoryview(protocol.get_buffer(len(data)))
        part = data[: len(room)]
        room[: len(part)] = part
        protocol.buffer_updated(len(part))
        data = data[len(part) :]
