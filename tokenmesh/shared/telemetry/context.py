"""Where a span hangs: W3C traceparents to OpenTelemetry contexts and back."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_FORBIDDEN_VERSION: Final = "ff"


def traceparent_of(context: SpanContext) -> str | None:
    """The header for a span; None for an invalid (all zero) context."""
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def current_traceparent() -> str | None:
    """The header for the current span; None outside any span."""
    return traceparent_of(trace.get_current_span().get_span_context())


def current_trace_id() -> str | None:
    """32 hexadecimal digits; None outside any span."""
    context = trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else None


@contextmanager
def untraced() -> Iterator[None]:
    """Inside the block no span is recorded, here or by those who are asked from here.

    For work of hundreds of alike steps, of which one span tells more than a span for each.
    """
    current = trace.get_current_span().get_span_context()
    unsampled = SpanContext(current.trace_id, current.span_id, is_remote=False)
    token = attach(trace.set_span_in_context(NonRecordingSpan(unsampled)))
    try:
        yield
    finally:
        detach(token)


def parent_context(traceparent: str | None) -> Context | None:
    """What to start a span in; None (the current span) without a valid traceparent.

    Clients send these, so a broken one is ignored as W3C asks.
    """
    match = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    if match is None or match[1] == _FORBIDDEN_VERSION or (match[1] == "00" and match[5]):
        return None
    context = SpanContext(
        trace_id=int(match[2], 16),
        span_id=int(match[3], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(match[4], 16)),
    )
    return trace.set_span_in_context(NonRecordingSpan(context)) if context.is_valid else None
