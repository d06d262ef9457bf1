"""HttpMeters: every HTTP request in Prometheus' terms, and how many are being answered now.

Metric objects are looked up once for each handler: a request should not pay for labels.
"""

from typing import Final

from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.metrics import Metrics

_OTHER: Final = "other"
"""The handler of a path that no route has: clients choose those."""


class _Handler:
    """The metric objects of one route and method."""

    def __init__(self, metrics: Metrics, handler: str, method: str) -> None:
        labels = {"handler": handler, "method": method}
        self.seconds = metrics.histogram("http_request_duration_seconds", **labels)
        self.request_bytes = metrics.histogram("http_request_size_bytes", handler=handler)
        self.response_bytes = metrics.histogram("http_response_size_bytes", handler=handler)


class HttpMeters:
    """Of one gateway process. Routes are few, so are the objects."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._handlers: dict[tuple[str, str], _Handler] = {}
        self._cancelled = metrics.counter("cancelled_requests")
        self.num_open = 0
        """Requests being answered, probes and scrapes included."""

    def begin(self) -> None:
        """A request has come."""
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
        """It is over. `sizes`: bytes of the two bodies; `handler`: its route's path."""
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
