"""Server: uvicorn inside the service's own event loop, without its signal handlers."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from tokenmesh.services.gateway.http.certificate import Certificate
from tokenmesh.services.gateway.http.connection import HttpConnection
from tokenmesh.services.gateway.http.handshakes import Handshakes
from tokenmesh.services.gateway.http.listener import forget, listen
from tokenmesh.services.gateway.http.open_files import connections_allowed
from tokenmesh.services.gateway.http.web_socket import WebSocket
from tokenmesh.shared.bus.base import RateLimitedLog
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.metrics import Metrics

logger = logging.getLogger(__name__)


def _connect(
    handshakes: Handshakes | None,
    settings: GatewaySettings,
    max_connections: int,
    refusals: RateLimitedLog,
    **uvicorns: Any,
) -> asyncio.Protocol:
    """The protocol of a connection that was accepted."""
    connection = HttpConnection(settings, max_connections, refusals, **uvicorns)
    return connection if handshakes is None else handshakes.before(connection)


class _Uvicorn(uvicorn.Server):
    """Signals are the service runtime's: it drains in the right order."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """The HTTP port of a gateway."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings, metrics: Metrics) -> None:
        self._settings = settings
        refusals = RateLimitedLog(
            logger,
            settings.refusal_log_interval_s,
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
        connection = partial(
            _connect, self._handshakes, settings, max(1, max_connections), refusals
        )
        self._socket = listen(settings)
        config = uvicorn.Config(
            app,
            # called as the class would be
            http=cast("type[asyncio.Protocol]", connection),
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
        """Where it listens; of interest when the setting was 0. 0 for a Unix socket."""
        return 0 if self._settings.uds else int(self._socket.getsockname()[1])

    async def run(self) -> None:
        """Serve until `stop`."""
        refreshing = asyncio.create_task(self._certificate.refresh()) if self._certificate else None
        try:
            await self._uvicorn.serve(sockets=[self._socket])
        finally:
            if refreshing is not None:
                refreshing.cancel()
            forget(self._settings)

    def stop(self, grace_s: float) -> None:
        """Take no new connections; let what runs finish for `grace_s`, then cancel it.

        A second is kept back, so that workers still hear of what was cancelled.
        """
        self._uvicorn.config.timeout_graceful_shutdown = max(0, int(grace_s - 1.0))
        self._uvicorn.should_exit = True
        if self._handshakes is not None:
            self._handshakes.stop()
