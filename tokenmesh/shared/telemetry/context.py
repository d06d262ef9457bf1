"""The current span as a `traceparent` header, by the OpenTelemetry API alone."""

from opentelemetry import trace


def current_traceparent() -> str | None:
    """W3C trace context of the current span; None outside any span."""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
