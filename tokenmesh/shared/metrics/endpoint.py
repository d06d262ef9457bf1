"""GET /metrics for processes that have no HTTP server of their own."""

import asyncio
from threading import Thread
from typing import Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import start_http_server

from tokenmesh.shared.config.telemetry import TelemetrySettings
from tokenmesh.shared.errors import ConfigError
from tokenmesh.shared.metrics.registry import Metrics


class MetricsEndpoint:
    """prometheus_client's server on a thread of its own."""

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.server_port

    @classmethod
    def start(cls, metrics: Metrics, host: str, port: int) -> Self:
        """Listen; port 0 is any free one. Raises ConfigError when the port is taken."""
        try:
            server, thread = start_http_server(port, host, metrics.registry)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}",
                param="telemetry.metrics_port",
            ) from error
        return cls(server, thread)

    async def stop(self) -> None:
        """Close the port."""
        # Returns only when the serving loop looked up, half a second later.
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        self._thread.join()


def start_metrics_endpoint(metrics: Metrics, settings: TelemetrySettings) -> MetricsEndpoint | None:
    """The endpoint that the settings ask for; None when its port is 0."""
    if settings.metrics_port == 0:
        return None
    return MetricsEndpoint.start(metrics, settings.metrics_host, settings.metrics_port)
