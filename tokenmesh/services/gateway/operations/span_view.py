"""A stored span as the JSON that `GET /traces/{id}` answers with."""

from collections.abc import Iterable
from typing import Final

import msgspec
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

Value = str | bool | int | float | list["Value"] | None

_STATUS: Final = {Status.STATUS_CODE_OK: "ok", Status.STATUS_CODE_ERROR: "error"}


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
        status=_STATUS.get(span.status.code, "unset"),
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
