"""Server: uvicorn inside the service's own event loop, without its signal handlers."""

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import ConfigError

logger = logging.getLogger(__name__)


class _Uvicorn(uvicorn.Server):
    """Signals are the service runtime's: it drains in the right order."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """The HTTP port of a gateway."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._socket = bind(settings)
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            date_header=False,
            timeout_keep_alive=settings.keep_alive_s,
            backlog=settings.backlog,
        )
        self._uvicorn = _Uvicorn(config)

    @property
    def port(self) -> int:
        """Where it listens; of interest when the setting was 0."""
        return int(self._socket.getsockname()[1])

    async def run(self) -> None:
        """Serve until `stop`."""
        await self._uvicorn.serve(sockets=[self._socket])

    def stop(self, grace_s: float) -> None:
        """Take no new connections; let what runs finish for `grace_s`, then cancel it.

        A second is kept back, so that workers still hear of what was cancelled.
        """
        self._uvicorn.config.timeout_graceful_shutdown = max(0, int(grace_s - 1.0))
        self._uvicorn.should_exit = True


def bind(settings: GatewaySettings) -> socket.socket:
    """A listening address. Raises ConfigError that says what to change."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
