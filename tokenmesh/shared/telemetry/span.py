"""Making spans: around work in progress, or after the fact from times that were noted."""

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from tokenmesh.shared.telemetry.context import parent_context, traceparent_of
from tokenmesh.shared.telemetry.recorder import Attributes, TimedEvent, current_recorder

REQUEST_ID: Final = "tokenmesh.request_id"
"""The attribute under which traces are found by request."""
TENANT: Final = "tokenmesh.tenant"
"""The attribute that says whose a trace is."""


class span:
    """A span that is current within the block; `parent` is a traceparent, else the current span.

    An exception marks the span as failed and goes on; a cancellation is noted, it is no failure.
    """

    __slots__ = ("_attributes", "_name", "_parent", "_span", "_token")

    def __init__(
        self, name: str, attributes: Attributes | None = None, parent: str | None = None
    ) -> None:
        self._name = name
        self._attributes = attributes
        self._parent = parent

    def __enter__(self) -> Span:
        """Start it."""
        parent = parent_context(self._parent)
        self._span = current_recorder().start(self._name, parent, self._attributes)
        self._token = otel_context.attach(trace.set_span_in_context(self._span))
        return self._span

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """End it."""
        if error is not None:
            _note(self._span, error)
        self._span.end()
        otel_context.detach(self._token)


def _note(failed: Span, error: BaseException) -> None:
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        failed.add_event("cancelled")
        return
    text = f"{type(error).__name__}: {error}"
    failed.add_event("exception", {"exception.type": type(error).__name__})
    failed.set_status(Status(StatusCode.ERROR, text))


def record_span(
    name: str,
    start_ns: int,
    end_ns: int,
    parent: str | None = None,
    attributes: Attributes | None = None,
    events: Iterable[TimedEvent] = (),
) -> str | None:
    """A span of the past; times are wall clock nanoseconds (`clock.now_ns`).

    Returns its traceparent, so that spans inside it can be recorded too.
    """
    recorder = current_recorder()
    times_ns = (start_ns, end_ns)
    return traceparent_of(
        recorder.record(name, times_ns, parent_context(parent), attributes, events)
    )
