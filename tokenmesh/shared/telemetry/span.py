"""Spans around work in progress, by the OpenTelemetry API alone."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import Span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

_propagator = TraceContextTextMapPropagator()


@contextmanager
def span(
    name: str,
    attributes: Mapping[str, AttributeValue] | None = None,
    parent: str | None = None,
) -> Iterator[Span]:
    """A span that is current within the block; `parent` is a traceparent, else the current span."""
    context = _propagator.extract({"traceparent": parent}) if parent else None
    tracer = trace.get_tracer("tokenmesh")
    with tracer.start_as_current_span(name, context=context, attributes=attributes) as current:
        yield current
