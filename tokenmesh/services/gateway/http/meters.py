"""HttpMeters: Prometheus metrics of HTTP requests, and the number of open ones.

Metric objects are looked up once per route, because a lookup by labels is slow.
"""

from typing import Final

from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.metrics import Metrics

_OTHER: Final = "other"
"""The handler of all paths without a route: clients choose those."""


class _Handler:
    """The metric objects of one route and method."""

    def __init__(self, metrics: Metrics, handler: str, method: str) -> None:
        labels = {"handler": handler, "method": method}
        self.seconds = metrics.histogram("http_request_duration_seconds", **labels)
        self.request_bytes = metrics.histogram("http_request_size_bytes", handler=handler)
        self.response_bytes = metrics.histogram("http_response_size_bytes", handler=handler)


class HttpMeters:
    """Of one gateway process; bounded by the number of routes."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._handlers: dict[tuple[str, str], _Handler] = {}
        self._cancelled = metrics.counter("cancelled_requests")
        self.num_open = 0
        """Open requests, including probes and scrapes."""

    def begin(self) -> None:
        self.num_open += 1

    def end(
        self,
        handler: str,
        method: str,
        status: int,
        started_s: float,
        sizes: tuple[int, int],
        *,
        has_client_left: bool,
    ) -> None:
        """Count a finished request. `handler`: its route's path; `sizes`: bytes of both bodies."""
        self.num_open -= 1
        if handler == _OTHER:
            method = _OTHER
        labels = {"handler": handler, "method": method, "status": str(status)}
        self._metrics.counter("http_requests", **labels).inc()
        if has_client_left:
            self._cancelled.inc()
        found = self._handlers.get((handler, method))
        if found is None:
            found = self._handlers[handler, method] = _Handler(self._metrics, handler, method)
        found.seconds.observe(monotonic_s() - started_s)
        found.request_bytes.observe(sizes[0])
        found.response_bytes.observe(sizes[1])
