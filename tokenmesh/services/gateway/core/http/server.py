"""Server: uvicorn inside the service's own event loop, and the socket that it listens on."""

import asyncio
import logging
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from tokenmesh.services.gateway.core.http.connection import HttpConnection
from tokenmesh.services.gateway.core.http.tls import Certificate, Handshakes
from tokenmesh.shared.bus.base import RateLimitedLog
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.http import ListenerSettings
from tokenmesh.shared.errors import ConfigError
from tokenmesh.shared.metrics import Metrics

logger = logging.getLogger(__name__)

REFUSAL_LOG_INTERVAL_S: Final = 60.0
"""Refused connections of one kind are logged this often."""

_SPARE_FILES: Final = 64
"""Open files for NATS, Redis, logs and libraries."""
_MAX_FRAGMENTS: Final = 4096
"""It bounds the fragments of one websocket message: empty fragments use memory but do not count
towards its size."""
_MAX_UNREAD_BYTES: Final = 1024 * 1024
"""Answers to pings that a client does not read."""
_TOO_BIG: Final = 1009
_STOP_POLL_S: Final = 0.01


class WebSocket(WebSocketsSansIOProtocol):
    """uvicorn's protocol with further bounds; the application ends its sessions itself."""

    def handle_ping(self) -> None:
        super().handle_ping()
        if self.transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            self.transport.abort()

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= _MAX_FRAGMENTS:
            self.conn.fail(_TOO_BIG, "too many fragments")
            self.handle_parser_exception()
            return
        super().handle_cont(event)

    def shutdown(self) -> None:
        """The server stops: an open session ends when its response is complete."""
        if not self.handshake_complete or self.close_sent:
            super().shutdown()


class _Uvicorn(uvicorn.Server):
    """The service's runtime handles signals: it drains in the right order."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        """Wait for `stopping`. uvicorn's loop wakes ten times a second to look for it."""
        await self.on_tick(0)
        await self.stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port and return when all requests have ended; uvicorn waits tenths of seconds.

        Requests that still run after `timeout_graceful_shutdown` seconds are cancelled.
        """
        for server in self.servers:
            server.close()
        for bound in sockets or ():
            bound.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while state.connections or state.tasks:  # noqa: ASYNC110
                    await asyncio.sleep(_STOP_POLL_S)
        except TimeoutError:
            if state.tasks:
                logger.warning("cancelling %d requests that did not end in time", len(state.tasks))
            for task in state.tasks:
                task.cancel()


class Server:
    """The HTTP port of a gateway."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings, metrics: Metrics) -> None:
        self._settings = settings
        refusals = RateLimitedLog(
            logger,
            REFUSAL_LOG_INTERVAL_S,
            on_problem=lambda kind: metrics.counter("refused_connections", kind=kind).inc(),
        )
        self._certificate = (
            Certificate(settings.ssl_certfile, settings) if settings.ssl_certfile else None
        )
        self._handshakes = (
            Handshakes(self._certificate.context, settings, refusals) if self._certificate else None
        )
        num_shaking = settings.max_handshakes if self._handshakes is not None else 0
        max_connections = connections_allowed(settings.max_connections + num_shaking) - num_shaking
        connect = partial(_connect, self._handshakes, settings, max(1, max_connections), refusals)
        self._socket = listen(settings)
        config = uvicorn.Config(
            app,
            # uvicorn calls it as it would call the class.
            http=cast("type[asyncio.Protocol]", connect),
            ws=WebSocket,
            ws_max_size=settings.realtime_max_message_bytes,
            ws_ping_interval=settings.realtime_ping_interval_s,
            ws_ping_timeout=settings.realtime_ping_timeout_s,
            # A few bytes from a client must not become megabytes here.
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            date_header=False,
            timeout_keep_alive=settings.keep_alive_s,
            backlog=settings.backlog,
        )
        config.load()
        self._uvicorn = _Uvicorn(config)

    @property
    def port(self) -> int:
        """The bound port, also where the setting is 0; 0 for a Unix socket."""
        return 0 if self._settings.uds else int(self._socket.getsockname()[1])

    async def run(self) -> None:
        refreshing = asyncio.create_task(self._certificate.refresh()) if self._certificate else None
        try:
            await self._uvicorn.serve(sockets=[self._socket])
        finally:
            if refreshing is not None:
                refreshing.cancel()
            # A cancelled uvicorn closes nothing. Without this the loop would go on to accept at the
            # number of the closed socket, which the next one that is opened gets.
            for server in getattr(self._uvicorn, "servers", ()):
                server.close()
            # uvicorn leaves it open when it is stopped before its first connection.
            self._socket.close()
            if self._settings.uds is not None:
                with suppress(OSError):
                    self._settings.uds.unlink()

    def stop(self, grace_s: float) -> None:
        """Accept no new connections; after `grace_s` cancel the requests that still run.

        One second is reserved for the Cancel messages to workers.
        """
        self._uvicorn.config.timeout_graceful_shutdown = max(0, int(grace_s - 1.0))
        self._uvicorn.should_exit = True
        self._uvicorn.stopping.set()
        if self._handshakes is not None:
            self._handshakes.stop()


def _connect(
    handshakes: Handshakes | None,
    settings: ListenerSettings,
    max_connections: int,
    refusals: RateLimitedLog,
    **uvicorns: Any,
) -> asyncio.Protocol:
    """The protocol of a new connection."""
    connection = HttpConnection(settings, max_connections, refusals, **uvicorns)
    return connection if handshakes is None else handshakes.before(connection)


def connections_allowed(wanted: int) -> int:
    """`wanted`, or less where the limit on open files (RLIMIT_NOFILE) cannot be raised enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    allowed = max(1, soft - _SPARE_FILES)
    logger.warning("at most %d connections: the limit on open files is %d", allowed, soft)
    return allowed


def listen(settings: ListenerSettings) -> socket.socket:
    """A listening Unix socket or TCP port. Raises ConfigError that says what to change."""
    if settings.uds is not None:
        return _listen_unix(settings.uds, settings.backlog)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # The protocol is explicit: asyncio disables Nagle's algorithm for IPPROTO_TCP, not for 0.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if settings.reuse_port:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((settings.host, settings.port))
        bound.listen(settings.backlog)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; "
            "choose another one with --host and --port",
            param="gateway.port",
        ) from error
    bound.setblocking(False)
    return bound


def _listen_unix(path: Path, backlog: int) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX)
    try:
        _remove_stale(path)
        bound.bind(str(path))
        # Clients of a Unix socket have no address: the file's mode decides who may connect.
        path.chmod(0o660)
        bound.listen(backlog)
    except OSError as error:
        bound.close()
        reason = error.strerror or error
        raise ConfigError(f"cannot listen on {path}: {reason}", param="gateway.uds") from error
    bound.setblocking(False)
    return bound


def _remove_stale(path: Path) -> None:
    """Remove a socket that refuses connections: it is left from a process that was killed."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
