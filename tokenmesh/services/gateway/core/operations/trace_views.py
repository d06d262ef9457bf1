"""Traces as clients see them: spans as JSON, summaries, and which summaries a list has."""

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Final

import msgspec
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

Value = str | bool | int | float | list["Value"] | None

_STATUS_NAMES: Final = {Status.STATUS_CODE_OK: "ok", Status.STATUS_CODE_ERROR: "error"}


class EventView(msgspec.Struct, frozen=True):
    """Something that happened at one moment of a span."""

    name: str
    time_ns: int
    attributes: dict[str, Value]


class SpanView(msgspec.Struct, frozen=True):
    """One span; ids are hexadecimal, times wall clock nanoseconds."""

    name: str
    service: str
    instance: str
    span_id: str
    parent_id: str | None
    start_ns: int
    end_ns: int
    attributes: dict[str, Value]
    events: list[EventView]
    status: str
    """unset, ok or error."""
    status_message: str


def view_span(data: bytes, service: str, instance: str) -> SpanView:
    """Decode an OTLP `Span` that a service sent."""
    span = Span.FromString(data)
    return SpanView(
        name=span.name,
        service=service,
        instance=instance,
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex() or None,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=view_attributes(span.attributes),
        events=[
            EventView(event.name, event.time_unix_nano, view_attributes(event.attributes))
            for event in span.events
        ],
        status=_STATUS_NAMES.get(span.status.code, "unset"),
        status_message=span.status.message,
    )


def view_attributes(attributes: Iterable[KeyValue]) -> dict[str, Value]:
    """Attributes by key; values that JSON cannot say become text."""
    return {attribute.key: _view_value(attribute.value) for attribute in attributes}


def _view_value(value: AnyValue) -> Value:
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value
        case "array_value":
            return [_view_value(each) for each in value.array_value.values]
        case None:
            return None
        case _:
            return str(value)


_FIRST_FAILURE: Final = 400
_STATUS: Final = "http.response.status_code"
_MODELS: Final = ("tokenmesh.model", "tokenmesh.asked_model")


class TraceSummary(msgspec.Struct, frozen=True):
    """One line of the list of traces."""

    trace_id: str
    request_id: str | None
    name: str
    """This is the name of the first span, and its attributes."""
    attributes: dict[str, object]
    start_ns: int
    end_ns: int
    num_spans: int
    services: list[str]
    has_error: bool

    @property
    def has_failed(self) -> bool:
        """Return whether a span has an error, or the client got one."""
        status = self.attributes.get(_STATUS)
        return self.has_error or (isinstance(status, int) and status >= _FIRST_FAILURE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFilter:
    """It holds what a trace must have; a field that is None is not compared."""

    status: str | None = None
    """ok, failed, or an HTTP status in digits."""
    model: str | None = None
    """As the request named it, or as it is called."""
    tenant: str | None = None
    since_ns: int | None = None
    until_ns: int | None = None
    """Both are compared with the beginning of a trace; wall clock."""
    min_ns: int = 0
    requests_only: bool = False
    """It tells whether traces without a request are left out."""

    def accepts(self, trace: TraceSummary, tenants: Set[str]) -> bool:
        """Return whether a trace is to be shown; `tenants` are those whose requests it holds."""
        return (
            self._has_status(trace)
            and (self.model is None or self.model in (trace.attributes.get(k) for k in _MODELS))
            and (self.tenant is None or self.tenant in tenants)
            and (self.since_ns is None or trace.start_ns >= self.since_ns)
            and (self.until_ns is None or trace.start_ns <= self.until_ns)
            and trace.end_ns - trace.start_ns >= self.min_ns
            and not (self.requests_only and trace.request_id is None)
        )

    def _has_status(self, trace: TraceSummary) -> bool:
        match self.status:
            case None:
                return True
            case "ok":
                return not trace.has_failed
            case "failed":
                return trace.has_failed
            case digits:
                return str(trace.attributes.get(_STATUS)) == digits


EVERY_TRACE: Final = TraceFilter()
