"""OpenRequests: the HTTP requests that this gateway answers now, and how recent ones ended."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.metrics import Metrics

WINDOW_S: Final = 60
"""Seconds over which ended requests are counted."""
_FIRST_ERROR: Final = 500
_FIRST_REFUSAL: Final = 400
_OTHER: Final = "other"
"""The handler of all paths without a route: clients choose those."""


@dataclass(slots=True)
class Outcomes:
    """POST requests that have ended."""

    requests: int = 0
    errors: int = 0
    """With a status of 500 or more."""
    refused: int = 0
    """With a status of 400 to 499."""


@dataclass(slots=True)
class _Slot(Outcomes):
    second: int = -1


class _Handler:
    """The metric objects of one route and method, looked up once: a lookup by labels is slow."""

    def __init__(self, metrics: Metrics, handler: str, method: str) -> None:
        labels = {"handler": handler, "method": method}
        self.seconds = metrics.histogram("http_request_duration_seconds", **labels)
        self.request_bytes = metrics.histogram("http_request_size_bytes", handler=handler)
        self.response_bytes = metrics.histogram("http_response_size_bytes", handler=handler)


class OpenRequests:
    """It counts the open requests of one gateway process.

    The server bounds open requests, the routes bound the metrics.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._handlers: dict[tuple[str, str], _Handler] = {}
        self._cancelled = metrics.counter("cancelled_requests")
        self.num_open = 0
        """Open requests, including probes and scrapes."""
        self._posts: dict[int, RequestContext] = {}
        """Open POST requests in the order of their arrival."""
        self._slots = [_Slot() for _ in range(WINDOW_S)]

    def begin(self, context: RequestContext) -> None:
        self.num_open += 1
        if context.method == "POST":
            self._posts[id(context)] = context

    def end(self, context: RequestContext, now: float | None = None) -> None:
        """The response is complete; `now` is monotonic."""
        self.num_open -= 1
        now = monotonic_s() if now is None else now
        if self._posts.pop(id(context), None) is not None:
            self._count(context.status, int(now))
        route = context.route
        method = _OTHER if route == _OTHER else context.method
        labels = {"handler": route, "method": method, "status": str(context.status)}
        self._metrics.counter("http_requests", **labels).inc()
        if context.has_client_left:
            self._cancelled.inc()
        found = self._handlers.get((route, method))
        if found is None:
            found = self._handlers[route, method] = _Handler(self._metrics, route, method)
        found.seconds.observe(now - context.started_s)
        length = context.headers.get(b"content-length", b"")
        found.request_bytes.observe(int(length) if length.isdigit() else 0)
        found.response_bytes.observe(context.response_bytes)

    def _count(self, status: int, second: int) -> None:
        slot = self._slots[second % WINDOW_S]
        if slot.second != second:
            slot.second, slot.requests, slot.errors, slot.refused = second, 0, 0, 0
        slot.requests += 1
        slot.errors += status >= _FIRST_ERROR
        slot.refused += _FIRST_REFUSAL <= status < _FIRST_ERROR

    def newest_first(self) -> Iterator[RequestContext]:
        """A copy of the open POST requests, so that requests may come and go meanwhile."""
        return iter([*reversed(self._posts.values())])

    def outcomes(self, now: float) -> Outcomes:
        """POST requests that ended in the last `WINDOW_S` seconds."""
        since = int(now) - WINDOW_S
        found = [slot for slot in self._slots if slot.second > since]
        return Outcomes(
            sum(slot.requests for slot in found),
            sum(slot.errors for slot in found),
            sum(slot.refused for slot in found),
        )
