"""TraceStore: the last traces of the mesh, as every gateway keeps them for itself.

Spans stay encoded until somebody looks: a gateway receives all spans of the mesh and is asked for
few of them.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

import msgspec
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tokenmesh.services.gateway.operations.span_view import SpanView, view_attributes, view_span
from tokenmesh.services.gateway.tenancy.tenant import Access
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Bus, Subscription
from tokenmesh.shared.config.mesh import TelemetrySettings
from tokenmesh.shared.errors import NotFound, ProtocolError
from tokenmesh.shared.telemetry import REQUEST_ID, TENANT


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
    start_ns: int
    service: str
    instance: str

    def view(self) -> SpanView:
        return view_span(self.data, self.service, self.instance)


@dataclass(slots=True)
class _Trace:
    spans: list[_StoredSpan] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    num_bytes: int = 0
    num_dropped: int = 0
    tenants: set[str] = field(default_factory=set)
    """Those whose requests are in it."""
    end_ns: int = 0
    has_error: bool = False

    def may_be_seen(self, access: Access) -> bool:
        """A client chooses the id of its trace: who adds to another's must not see it so."""
        return access.is_admin or self.tenants == {access.tenant.name}


class TraceStore:
    """Traces by id and by request id, the least recently extended one leaves first.

    A trace is seen by the tenant whose requests it holds and by admins; until the first of these
    requests has ended, and where several tenants' met in it, by admins only.
    """

    def __init__(self, settings: TelemetrySettings) -> None:
        self._settings = settings
        self._traces: OrderedDict[str, _Trace] = OrderedDict()
        self._traces_by_request: dict[str, list[str]] = {}
        """The newest last: clients, and several of them, may use an id again."""
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._traces)

    @property
    def num_bytes(self) -> int:
        """Encoded size of all spans kept."""
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
        for resource_spans in ExportTraceServiceRequest.FromString(data).resource_spans:
            resource = view_attributes(resource_spans.resource.attributes)
            service = str(resource.get("service.name", "unknown"))
            instance = str(resource.get("service.instance.id", ""))
            for scope_spans in resource_spans.scope_spans:
                for span in scope_spans.spans:
                    self._add_span(span, service, instance)
        self._evict()

    def get(self, key: str, access: Access) -> TraceView:
        """The trace of an id, or the newest of a request's id. Raises NotFound."""
        trace_id, found = self._find(key, access)
        return TraceView(
            trace_id=trace_id,
            request_id=next(iter(found.request_ids), None),
            dropped_spans=found.num_dropped,
            spans=[span.view() for span in sorted(found.spans, key=lambda each: each.start_ns)],
        )

    def recent(self, limit: int, access: Access) -> list[TraceSummary]:
        """The most recently extended traces, newest first."""
        newest = (
            trace_id
            for trace_id, trace in reversed(self._traces.items())
            if trace.may_be_seen(access)
        )
        return [self._summarize(trace_id) for trace_id in islice(newest, limit)]

    def _find(self, key: str, access: Access) -> tuple[str, _Trace]:
        for trace_id in (*reversed(self._traces_by_request.get(key, ())), key):
            found = self._traces.get(trace_id)
            if found is not None and found.may_be_seen(access):
                return trace_id, found
        raise NotFound(
            f"no trace of {key!r}: unknown, not sampled, not yet arrived, or too long ago"
        )

    def _summarize(self, trace_id: str) -> TraceSummary:
        found = self._traces[trace_id]
        first = min(found.spans, key=lambda span: span.start_ns).view()
        return TraceSummary(
            trace_id=trace_id,
            request_id=next(iter(found.request_ids), None),
            name=first.name,
            attributes=dict(first.attributes),
            start_ns=first.start_ns,
            end_ns=found.end_ns,
            num_spans=len(found.spans),
            services=sorted({span.service for span in found.spans}),
            has_error=found.has_error,
        )

    def _add_span(self, span: Span, service: str, instance: str) -> None:
        trace_id = span.trace_id.hex()
        trace = self._traces.get(trace_id)
        if trace is None:
            trace = self._traces[trace_id] = _Trace()
        self._traces.move_to_end(trace_id)
        tenant = _text(span, TENANT)
        if tenant is not None:
            trace.tenants.add(tenant)
        if len(trace.spans) >= self._settings.max_trace_spans:
            trace.num_dropped += 1
            return
        data = span.SerializeToString()
        trace.spans.append(_StoredSpan(data, span.start_time_unix_nano, service, instance))
        trace.num_bytes += len(data)
        self._num_bytes += len(data)
        trace.end_ns = max(trace.end_ns, span.end_time_unix_nano)
        trace.has_error |= span.status.code == Status.STATUS_CODE_ERROR
        self._index(trace_id, trace, span)

    def _index(self, trace_id: str, trace: _Trace, span: Span) -> None:
        request_id = _text(span, REQUEST_ID)
        if request_id is not None and request_id not in trace.request_ids:
            trace.request_ids.append(request_id)
            self._traces_by_request.setdefault(request_id, []).append(trace_id)

    def _evict(self) -> None:
        settings = self._settings
        while len(self._traces) > settings.max_traces or self._num_bytes > settings.max_trace_bytes:
            trace_id, trace = self._traces.popitem(last=False)
            self._num_bytes -= trace.num_bytes
            for request_id in trace.request_ids:
                others = self._traces_by_request[request_id]
                others.remove(trace_id)
                if not others:
                    del self._traces_by_request[request_id]


def _text(span: Span, key: str) -> str | None:
    for attribute in span.attributes:
        if attribute.key == key:
            return attribute.value.string_value
    return None
