"""TraceStore: the last traces of the mesh, as every gateway keeps them for itself.

A gateway receives all spans of the mesh and shows few of them. It cuts what arrives into spans and
sorts them by trace id; their content is decoded, in turns with other work, when a client looks.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Final

import msgspec
from google.protobuf.message import DecodeError
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tokenmesh.services.gateway.core.http.event_loop import Turns
from tokenmesh.services.gateway.core.operations.trace_views import (
    EVERY_TRACE,
    SpanView,
    TraceFilter,
    TraceSummary,
    view_attributes,
    view_span,
)
from tokenmesh.services.gateway.core.tenancy.tenant import Access
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
_MAX_REQUEST_IDS: Final = 1024
"""It bounds the request ids of one trace: a client may send all its requests under one trace id."""


class TraceView(msgspec.Struct, frozen=True):
    """One trace with its spans in order of their beginning."""

    trace_id: str
    request_id: str | None
    dropped_spans: int
    """Spans that came after the bound of a trace was reached."""
    spans: list[SpanView]


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
    request_ids: dict[str, None] = field(default_factory=dict)
    tenants: set[str] = field(default_factory=set)
    """Those whose requests are in the trace."""
    first: tuple[int, _StoredSpan] | None = None
    """The span that began first, and when."""
    summary: TraceSummary | None = None
    """None: spans were added since it was made."""
    end_ns: int = 0
    has_error: bool = False

    def add(self, span: _StoredSpan, max_spans: int) -> int:
        """Keep a span; how many bytes that takes, 0 when the trace is full."""
        if len(self.spans) < max_spans:
            self.spans.append(span)
            self.num_bytes += len(span.data)
            return len(span.data)
        self.num_dropped += 1
        self.summary = None
        with suppress(DecodeError):
            self._note_identity(Span.FromString(span.data))
        return 0

    async def read(self, turns: Turns) -> None:
        """Decode the spans that arrived since the last call; an undecodable one is dropped."""
        while self.num_read < len(self.spans):
            stored = self.spans[self.num_read]
            try:
                span = Span.FromString(stored.data)
            except DecodeError:
                del self.spans[self.num_read]
                self.num_dropped += 1
                continue
            self.num_read += 1
            self.summary = None
            self._note_identity(span)
            if self.first is None or span.start_time_unix_nano < self.first[0]:
                self.first = (span.start_time_unix_nano, stored)
            self.end_ns = max(self.end_ns, span.end_time_unix_nano)
            self.has_error |= span.status.code == Status.STATUS_CODE_ERROR
            await turns.rest()

    def may_be_seen(self, access: Access) -> bool:
        """Clients choose trace ids, so adding spans to a trace must not make it visible."""
        return access.is_admin or self.tenants == {access.tenant.name}

    def _note_identity(self, span: Span) -> None:
        for attribute in span.attributes:
            if attribute.key == TENANT:
                self.tenants.add(attribute.value.string_value)
            elif attribute.key == REQUEST_ID and len(self.request_ids) < _MAX_REQUEST_IDS:
                self.request_ids[attribute.value.string_value] = None


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
        self.num_received = 0
        """Spans that have arrived."""

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

    async def get(self, key: str, access: Access) -> TraceView:
        """The trace of an id, or the newest of a request's id. Raises NotFound."""
        turns = Turns()
        trace_id, found = self._find(key, await self._visible(access, turns))
        views = []
        for span in list(found.spans):
            views.append(span.view())
            await turns.rest()
        return TraceView(
            trace_id=trace_id.hex(),
            request_id=next(iter(found.request_ids), None),
            dropped_spans=found.num_dropped,
            spans=sorted(views, key=lambda each: each.start_ns),
        )

    async def recent(
        self, limit: int, access: Access, chosen: TraceFilter = EVERY_TRACE
    ) -> list[TraceSummary]:
        """The most recently extended traces that are chosen, newest first."""
        turns, summaries = Turns(), list[TraceSummary]()
        visible = await self._visible(access, turns)
        for trace_id, trace in reversed(visible.items()):
            await turns.rest()
            if not trace.first:
                continue
            if trace.summary is None:
                trace.summary = _summary(trace_id, trace)
            if chosen.accepts(trace.summary, trace.tenants):
                summaries.append(trace.summary)
                if len(summaries) == limit:
                    break
        return summaries

    async def _visible(self, access: Access, turns: Turns) -> dict[bytes, _Trace]:
        visible = {}
        for trace_id, trace in list(self._traces.items()):
            await trace.read(turns)
            if trace.may_be_seen(access):
                visible[trace_id] = trace
        return visible

    def _find(self, key: str, visible: dict[bytes, _Trace]) -> tuple[bytes, _Trace]:
        by_request = [item for item in visible.items() if key in item[1].request_ids]
        if by_request:
            return max(by_request, key=lambda item: item[1].number)
        trace_id = _trace_id(key)
        if trace_id in visible:
            return trace_id, visible[trace_id]
        raise NotFound(
            f"no trace of {key!r}: unknown, not sampled, not yet arrived, or too long ago"
        )

    def _add_span(self, span: _StoredSpan) -> None:
        if not span.data.startswith(_TRACE_ID_HEAD) or len(span.data) < 18:
            raise DecodeError("a span does not begin with its trace id")
        trace_id = span.data[2:18]
        self.num_received += 1
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
