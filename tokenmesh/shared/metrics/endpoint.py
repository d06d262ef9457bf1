"""The metrics of a process over HTTP, for services that have no other HTTP server."""

import asyncio
from collections.abc import Iterable
from functools import partial
from socketserver import ThreadingMixIn
from threading import Thread
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from tokenmesh.shared.config.mesh import TelemetrySettings
from tokenmesh.shared.errors import ConfigError
from tokenmesh.shared.metrics.registry import Metrics


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Handler(WSGIRequestHandler):
    timeout = 10  # seconds without a byte

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged."""


def _answer(
    metrics: Metrics, environ: WSGIEnvironment, start_response: StartResponse
) -> Iterable[bytes]:
    text, media_type = metrics.render_with(lambda _: b"", environ.get("HTTP_ACCEPT", ""))
    start_response("200 OK", [("Content-Type", media_type)])
    return [text]


class MetricsEndpoint:
    """A server on a thread of its own, and a thread for each scrape."""

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        return self._server.server_port

    @classmethod
    def start(cls, metrics: Metrics, host: str, port: int) -> Self:
        """Listen; port 0 is any free one. Raises ConfigError when the port is taken."""
        try:
            server = make_server(host, port, partial(_answer, metrics), _Server, _Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}",
                param="telemetry.metrics_port",
            ) from error
        thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        return cls(server, thread)

    async def stop(self) -> None:
        # Returns only when the serving loop looked up, half a second later.
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        self._thread.join()


def start_metrics_endpoint(metrics: Metrics, settings: TelemetrySettings) -> MetricsEndpoint | None:
    """The configured endpoint; None when its port is 0."""
    if settings.metrics_port == 0:
        return None
    return MetricsEndpoint.start(metrics, settings.metrics_host, settings.metrics_port)
