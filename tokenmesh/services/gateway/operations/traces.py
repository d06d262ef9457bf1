"""TraceStore: the last traces of the mesh, as every gateway keeps them for itself.

A gateway receives all spans of the mesh and shows few of them. It cuts what arrives into spans and
sorts them by trace id; their content is decoded when a client requests the trace.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, islice
from typing import Final

import msgspec
from google.protobuf.message import DecodeError
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tokenmesh.services.gateway.operations.span_view import SpanView, view_attributes, view_span
from tokenmesh.services.gateway.tenancy.tenant import Access
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Bus, Subscription
from tokenmesh.shared.config.mesh import TelemetrySettings
from tokenmesh.shared.errors import NotFound, ProtocolError
from tokenmesh.shared.telemetry import REQUEST_ID, TENANT

_RESOURCES_CACHED: Final = 256
_NESTED: Final = 2
"""The wire type of everything above the spans: a length and as many bytes."""
_TRACE_ID_HEAD: Final = b"\x0a\x10"
"""A span begins with its trace id: field 1, 16 bytes."""


class TraceView(msgspec.Struct, frozen=True):
    """One trace with its spans in order of their beginning."""

    trace_id: str
    request_id: str | None
    dropped_spans: int
    """Spans that came after the bound of a trace was reached."""
    spans: list[SpanView]


class TraceSummary(msgspec.Struct, frozen=True):
    """One line of the list of traces."""

    trace_id: str
    request_id: str | None
    name: str
    """Of the first span, and its attributes."""
    attributes: dict[str, object]
    start_ns: int
    end_ns: int
    num_spans: int
    services: list[str]
    has_error: bool


@dataclass(slots=True)
class _StoredSpan:
    data: bytes
    service: str
    instance: str

    def view(self) -> SpanView:
        return view_span(self.data, self.service, self.instance)


@dataclass(slots=True)
class _Trace:
    number: int
    """Traces are numbered as they begin."""
    spans: list[_StoredSpan] = field(default_factory=list)
    num_bytes: int = 0
    num_dropped: int = 0
    num_read: int = 0
    """Spans whose facts are in the fields below."""
    request_ids: list[str] = field(default_factory=list)
    tenants: set[str] = field(default_factory=set)
    """Those whose requests are in the trace."""
    first: tuple[int, _StoredSpan] | None = None
    """The span that began first, and when."""
    end_ns: int = 0
    has_error: bool = False

    def add(self, span: _StoredSpan, max_spans: int) -> int:
        """Keep a span; how many bytes that takes, 0 when the trace is full."""
        if len(self.spans) < max_spans:
            self.spans.append(span)
            self.num_bytes += len(span.data)
            return len(span.data)
        self.num_dropped += 1
        self._note_identity(span)
        return 0

    def read(self) -> None:
        """Decode the spans that arrived since the last call; an undecodable one is dropped."""
        for stored in self.spans[self.num_read :]:
            span = self._note_identity(stored)
            if span is None:
                self.spans.remove(stored)
                self.num_dropped += 1
                continue
            self.num_read += 1
            if self.first is None or span.start_time_unix_nano < self.first[0]:
                self.first = (span.start_time_unix_nano, stored)
            self.end_ns = max(self.end_ns, span.end_time_unix_nano)
            self.has_error |= span.status.code == Status.STATUS_CODE_ERROR

    def mentions(self, text: bytes) -> bool:
        """Whether a span may hold the text, without decoding any."""
        return any(text in span.data for span in self.spans)

    def may_be_seen(self, access: Access) -> bool:
        """Clients choose trace ids, so adding spans to a trace must not make it visible."""
        self.read()
        return access.is_admin or self.tenants == {access.tenant.name}

    def _note_identity(self, stored: _StoredSpan) -> Span | None:
        try:
            span = Span.FromString(stored.data)
        except DecodeError:
            return None
        for attribute in span.attributes:
            if attribute.key == TENANT:
                self.tenants.add(attribute.value.string_value)
            elif attribute.key == REQUEST_ID:
                request_id = attribute.value.string_value
                if request_id not in self.request_ids:
                    self.request_ids.append(request_id)
        return span


class TraceStore:
    """Traces by id and by request id; the least recently extended one is evicted first.

    A trace is visible to the tenant whose requests it holds and to admins. Until the first of these
    requests has ended, and where requests of several tenants are in it, only to admins.
    """

    def __init__(self, settings: TelemetrySettings) -> None:
        self._settings = settings
        self._traces: OrderedDict[bytes, _Trace] = OrderedDict()
        self._numbers = count()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._traces)

    @property
    def num_bytes(self) -> int:
        """Encoded size of all stored spans."""
        return self._num_bytes

    async def follow(self, bus: Bus) -> Subscription:
        """Take in every span that any service of the mesh publishes from now on."""

        async def receive(subject: str, data: bytes) -> None:
            try:
                self.add(data)
            except DecodeError as error:
                raise ProtocolError("undecodable spans") from error

        return await bus.subscribe_raw(subjects.ALL_SPANS, receive)

    def add(self, data: bytes) -> None:
        """Take in an ExportTraceServiceRequest. Raises DecodeError."""
        for _, of_resource in _fields(data, 0, len(data)):
            resource, scopes = b"", []
            for number, inner in _fields(data, *of_resource):
                if number == 1:
                    resource = data[slice(*inner)]
                elif number == 2:
                    scopes.append(inner)
            service, instance = _process_of(resource)
            for scope in scopes:
                for number, (start, end) in _fields(data, *scope):
                    if number == 2:
                        self._add_span(_StoredSpan(data[start:end], service, instance))
        self._evict()

    def get(self, key: str, access: Access) -> TraceView:
        """The trace of an id, or the newest of a request's id. Raises NotFound."""
        trace_id, found = self._find(key, access)
        views = [span.view() for span in found.spans]
        return TraceView(
            trace_id=trace_id.hex(),
            request_id=next(iter(found.request_ids), None),
            dropped_spans=found.num_dropped,
            spans=sorted(views, key=lambda each: each.start_ns),
        )

    def recent(self, limit: int, access: Access) -> list[TraceSummary]:
        """The most recently extended traces, newest first."""
        tenant = b"" if access.is_admin else access.tenant.name.encode()
        newest = (
            _summary(trace_id, trace)
            for trace_id, trace in reversed(self._traces.items())
            if (not tenant or trace.tenants or trace.mentions(tenant))
            and trace.may_be_seen(access)
            and trace.first is not None
        )
        return list(islice(newest, limit))

    def _find(self, key: str, access: Access) -> tuple[bytes, _Trace]:
        text = key.encode("utf-8", "replace")
        by_request = [
            (trace.number, trace_id, trace)
            for trace_id, trace in self._traces.items()
            if key in trace.request_ids or trace.mentions(text)
        ]
        for _, trace_id, trace in sorted(by_request, reverse=True):
            if trace.may_be_seen(access) and key in trace.request_ids:
                return trace_id, trace
        trace_id = _trace_id(key)
        found = self._traces.get(trace_id)
        if found is not None and found.may_be_seen(access):
            return trace_id, found
        raise NotFound(
            f"no trace of {key!r}: unknown, not sampled, not yet arrived, or too long ago"
        )

    def _add_span(self, span: _StoredSpan) -> None:
        if not span.data.startswith(_TRACE_ID_HEAD) or len(span.data) < 18:
            raise DecodeError("a span does not begin with its trace id")
        trace_id = span.data[2:18]
        trace = self._traces.get(trace_id)
        if trace is None:
            trace = self._traces[trace_id] = _Trace(next(self._numbers))
        else:
            self._traces.move_to_end(trace_id)
        self._num_bytes += trace.add(span, self._settings.max_trace_spans)

    def _evict(self) -> None:
        settings = self._settings
        while len(self._traces) > settings.max_traces or self._num_bytes > settings.max_trace_bytes:
            _, trace = self._traces.popitem(last=False)
            self._num_bytes -= trace.num_bytes


def _summary(trace_id: bytes, trace: _Trace) -> TraceSummary:
    assert trace.first is not None
    first = trace.first[1].view()
    return TraceSummary(
        trace_id=trace_id.hex(),
        request_id=next(iter(trace.request_ids), None),
        name=first.name,
        attributes=dict(first.attributes),
        start_ns=first.start_ns,
        end_ns=trace.end_ns,
        num_spans=len(trace.spans),
        services=sorted({span.service for span in trace.spans}),
        has_error=trace.has_error,
    )


def _trace_id(key: str) -> bytes:
    try:
        return bytes.fromhex(key)
    except ValueError:
        return b""


@lru_cache(_RESOURCES_CACHED)
def _process_of(resource: bytes) -> tuple[str, str]:
    """Service and instance of an encoded Resource. Raises DecodeError."""
    attributes = view_attributes(Resource.FromString(resource).attributes)
    service = str(attributes.get("service.name", "unknown"))
    return service, str(attributes.get("service.instance.id", ""))


def _fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Number and bounds of each field of a protobuf message in data[start:end].

    For messages whose fields are all messages, texts or bytes. Raises DecodeError for others.
    """
    while start < end:
        tag, start = data[start], start + 1
        size = shift = 0
        while True:
            if start >= end or shift > 28:
                raise DecodeError("a field has no length")
            byte, start = data[start], start + 1
            size |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        if tag & 7 != _NESTED or tag > 127 or start + size > end:
            raise DecodeError("not a message of spans")
        yield tag >> 3, (start, start + size)
        start += size
