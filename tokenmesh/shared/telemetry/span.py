"""Making spans: around work in progress, or after the fact from times that were noted."""

import asyncio
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from types import TracebackType
from typing import Final

from tokenmesh.shared.clock import now_ns, perf_s
from tokenmesh.shared.telemetry.recorder import (
    Attributes,
    Event,
    RecordedSpan,
    Span,
    current_recorder,
)

REQUEST_ID: Final = "tokenmesh.request_id"
"""The attribute under which traces are found by request."""
TENANT: Final = "tokenmesh.tenant"
"""The attribute with the tenant that a trace belongs to."""

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_FORBIDDEN_VERSION: Final = "ff"
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16
_PARENTS_CACHED: Final = 512
_NS_PER_S: Final = 1_000_000_000

_UNTRACED: Final = Span(_NO_TRACE, _NO_SPAN, "00")
"""The span of a block that is in no trace, while telemetry is off."""
_current: Final[ContextVar[Span | None]] = ContextVar("span", default=None)


def current_traceparent() -> str | None:
    """The header for the current span; None outside any span."""
    current = _current.get()
    return current.traceparent if current is not None else None


def current_trace_id() -> str | None:
    """32 hexadecimal digits; None outside any span."""
    current = _current.get()
    return current.trace_id if current is not None else None


def sampled_trace_id() -> str | None:
    """The same where the trace is recorded, else None."""
    current = _current.get()
    return current.trace_id if current is not None and current.is_sampled else None


@lru_cache(_PARENTS_CACHED)
def _parse(traceparent: str) -> Span | None:
    """The span that a header names; None for a broken header, which W3C says to ignore."""
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None or match[1] == _FORBIDDEN_VERSION or (match[1] == "00" and match[5]):
        return None
    if match[2] == _NO_TRACE or match[3] == _NO_SPAN:
        return None
    return Span(match[2], match[3], match[4])


def _above(traceparent: str | None) -> Span | None:
    """The parent of a new span: the one in the header, else the current one."""
    return (_parse(traceparent) if traceparent else None) or _current.get()


class span:
    """A span that is current within the block; `parent` is a traceparent, else the current span.

    An exception marks the span as failed and is raised again; a cancellation becomes an event.
    """

    __slots__ = ("_attributes", "_name", "_parent", "_span", "_token")

    def __init__(
        self, name: str, attributes: Attributes | None = None, parent: str | None = None
    ) -> None:
        self._name = name
        self._attributes = attributes
        self._parent = parent

    def __enter__(self) -> Span:
        above = _above(self._parent)
        recorder = current_recorder()
        if recorder is None:
            self._span = above or _UNTRACED
            self._token = _current.set(above)
        else:
            self._span = recorder.start(self._name, above, self._attributes)
            self._token = _current.set(self._span)
        return self._span

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        ended = self._span
        recorder = current_recorder()
        if recorder is not None and type(ended) is RecordedSpan and not ended.end_ns:
            if error is not None:
                _note(ended, error)
            ended.end_ns = now_ns()
            recorder.finish(ended)
        # An abandoned generator is closed in another context than it ran in.
        with suppress(ValueError):
            _current.reset(self._token)


def _note(failed: Span, error: BaseException) -> None:
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        failed.add_event("cancelled")
        return
    failed.add_event("exception", {"exception.type": type(error).__name__})
    failed.fail(f"{type(error).__name__}: {error}")


@contextmanager
def untraced() -> Iterator[None]:
    """Inside the block no span is recorded, also in services that are called from here.

    For hundreds of similar steps, which one span describes better than a span for each.
    """
    current = _current.get()
    if current is None:
        yield
        return
    token = _current.set(Span(current.trace_id, current.span_id, "00"))
    try:
        yield
    finally:
        _current.reset(token)


def record_span(
    name: str,
    start_ns: int,
    end_ns: int,
    parent: str | None = None,
    attributes: Attributes | None = None,
    events: Iterable[Event] = (),
) -> str | None:
    """A span of the past; times are wall clock nanoseconds (`clock.now_ns`).

    Returns its traceparent, so that spans inside it can be recorded too.
    """
    above = _above(parent)
    recorder = current_recorder()
    if recorder is not None:
        return recorder.record(name, (start_ns, end_ns), above, attributes, events).traceparent
    return above.traceparent if above is not None else None


class Tally:
    """Many short stretches of work as one span, from the first to the last, with their sum.

    Use `with tally:` around each stretch and `record` at the end. Stretches do not nest.
    """

    __slots__ = ("_began_s", "_busy_s", "_count", "_ended_s", "_first_s", "_name", "_start_ns")

    def __init__(self, name: str) -> None:
        self._name = name
        self._start_ns = 0
        self._first_s = self._began_s = self._ended_s = self._busy_s = 0.0
        self._count = 0

    def __enter__(self) -> None:
        self._began_s = perf_s()
        if not self._count:
            self._start_ns = now_ns()
            self._first_s = self._began_s

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._ended_s = perf_s()
        self._busy_s += self._ended_s - self._began_s
        self._count += 1

    def record(self, attributes: Attributes | None = None, parent: str | None = None) -> None:
        """Make the span, unless there was no stretch. `parent` as in `span`."""
        if not self._count:
            return
        end_ns = self._start_ns + round((self._ended_s - self._first_s) * _NS_PER_S)
        facts = {"count": self._count, "busy_ms": round(self._busy_s * 1e3, 3)}
        record_span(self._name, self._start_ns, end_ns, parent, {**facts, **(attributes or {})})
