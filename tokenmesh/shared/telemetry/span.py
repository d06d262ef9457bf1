"""Making spans: around work in progress, or after the fact from times that were noted."""

import asyncio
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from tokenmesh.shared.telemetry.context import parent_context, traceparent_of
from tokenmesh.shared.telemetry.tracer import current_tracer

Attributes = Mapping[str, AttributeValue]
TimedEvent = tuple[str, int, Attributes | None]
"""Name, wall clock nanoseconds, attributes."""

REQUEST_ID: Final = "tokenmesh.request_id"
"""The attribute under which traces are found by request."""


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
        self._span = current_tracer().start_span(
            self._name,
            context=parent_context(self._parent),
            attributes=self._attributes,
            record_exception=False,
            set_status_on_exception=False,
        )
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
    past = current_tracer().start_span(
        name, context=parent_context(parent), attributes=attributes, start_time=start_ns
    )
    if past.is_recording():
        for event, at_ns, details in events:
            past.add_event(event, details, at_ns)
    past.end(end_ns)
    return traceparent_of(past.get_span_context())
