"""The trace store and its routes."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status
from starlette.middleware.base import RequestResponseEndpoint
from starlette.responses import Response

from tokenmesh.services.gateway.apis.operator.routes import traces_router
from tokenmesh.services.gateway.core.context import RequestContext, attach
from tokenmesh.services.gateway.core.operations.trace_views import TraceFilter
from tokenmesh.services.gateway.core.operations.traces import TraceStore
from tokenmesh.services.gateway.core.tenancy.tenant import DEFAULT_TENANT, Access, Tenant
from tokenmesh.shared.config.mesh import TelemetrySettings
from tokenmesh.shared.errors import NotFound, TokenMeshError
from tokenmesh.shared.ids import RequestId

ADMIN = Access(DEFAULT_TENANT, is_admin=True)


def attribute(key: str, value: object) -> KeyValue:
    match value:
        case bool():
            return KeyValue(key=key, value=AnyValue(bool_value=value))
        case str():
            return KeyValue(key=key, value=AnyValue(string_value=value))
        case int():
            return KeyValue(key=key, value=AnyValue(int_value=value))
        case float():
            return KeyValue(key=key, value=AnyValue(double_value=value))
    raise TypeError(value)


def a_span(
    number: int,
    trace: int = 1,
    *,
    name: str = "step",
    request_id: str | None = None,
    tenant: str | None = None,
    start_ns: int = 0,
    parent: int | None = None,
    **attributes: object,
) -> Span:
    texts = {"tokenmesh.request_id": request_id, "tokenmesh.tenant": tenant}
    values = {**attributes, **{key: text for key, text in texts.items() if text}}
    return Span(
        trace_id=trace.to_bytes(16, "big"),
        span_id=number.to_bytes(8, "big"),
        parent_span_id=b"" if parent is None else parent.to_bytes(8, "big"),
        name=name,
        start_time_unix_nano=start_ns,
        end_time_unix_nano=start_ns + 10,
        attributes=[attribute(key, value) for key, value in values.items()],
    )


def packed(*spans: Span, service: str = "gateway") -> bytes:
    sent = ResourceSpans(scope_spans=[ScopeSpans(spans=spans)])
    sent.resource.attributes.append(attribute("service.name", service))
    sent.resource.attributes.append(attribute("service.instance.id", f"{service}-1"))
    return ExportTraceServiceRequest(resource_spans=[sent]).SerializeToString()


def trace_id(number: int) -> str:
    return f"{number:032x}"


def store_of(**settings: object) -> TraceStore:
    return TraceStore(TelemetrySettings.model_validate(settings))


async def test_a_trace_is_found_by_its_id_and_by_its_request() -> None:
    store = store_of()
    store.add(packed(a_span(2, request_id="chatcmpl-1", parent=1), service="worker"))
    store.add(packed(a_span(1, name="http")))
    by_request = await store.get("chatcmpl-1", ADMIN)
    assert by_request == await store.get(trace_id(1), ADMIN)
    assert by_request.request_id == "chatcmpl-1"
    assert {(span.name, span.service, span.parent_id) for span in by_request.spans} == {
        ("http", "gateway", None),
        ("step", "worker", f"{1:016x}"),
    }


async def test_spans_come_in_order_of_their_beginning() -> None:
    store = store_of()
    store.add(packed(a_span(1, start_ns=30), a_span(2, start_ns=10), a_span(3, start_ns=20)))
    assert [span.start_ns for span in (await store.get(trace_id(1), ADMIN)).spans] == [10, 20, 30]


async def test_every_kind_of_value_can_be_shown() -> None:
    span = a_span(1, text="a<b>", yes=True, count=-3, share=0.5)
    numbers = ArrayValue(values=[AnyValue(int_value=1), AnyValue(string_value="x")])
    span.attributes.append(KeyValue(key="list", value=AnyValue(array_value=numbers)))
    span.attributes.append(KeyValue(key="empty", value=AnyValue()))
    span.attributes.append(KeyValue(key="bytes", value=AnyValue(bytes_value=b"\x00\xff")))
    span.events.add(name="step", time_unix_nano=5, attributes=[attribute("batch", 4)])
    span.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message="broke"))
    store = store_of()
    store.add(packed(span))
    (shown,) = (await store.get(trace_id(1), ADMIN)).spans
    text = shown.attributes.pop("bytes")
    assert isinstance(text, str)
    assert shown.attributes == {
        "text": "a<b>",
        "yes": True,
        "count": -3,
        "share": 0.5,
        "list": [1, "x"],
        "empty": None,
    }
    assert [(event.name, event.attributes) for event in shown.events] == [("step", {"batch": 4})]
    assert (shown.status, shown.status_message) == ("error", "broke")


async def test_the_least_recently_extended_trace_leaves_first() -> None:
    store = store_of(max_traces=2)
    store.add(packed(a_span(1, trace=1, request_id="one")))
    store.add(packed(a_span(1, trace=2, request_id="two")))
    store.add(packed(a_span(2, trace=1)))
    store.add(packed(a_span(1, trace=3, request_id="three")))
    assert [trace.request_id for trace in await store.recent(10, ADMIN)] == ["three", "one"]
    for gone in ("two", trace_id(2)):
        with pytest.raises(NotFound):
            await store.get(gone, ADMIN)


async def test_a_trace_holds_a_bounded_number_of_spans_and_counts_the_rest() -> None:
    store = store_of(max_trace_spans=3)
    for number in range(1, 8):
        store.add(packed(a_span(number)))
    assert len((await store.get(trace_id(1), ADMIN)).spans) == 3
    assert (await store.get(trace_id(1), ADMIN)).dropped_spans == 4


async def test_bytes_are_bounded_over_all_traces() -> None:
    store = store_of(max_trace_bytes=4096)
    for number in range(1, 50):
        store.add(packed(a_span(1, trace=number, text="x" * 500)))
        assert store.num_bytes <= 4096
    assert 5 < len(store) < 10
    assert (await store.recent(1, ADMIN))[0].trace_id == trace_id(49)


async def test_an_evicted_trace_leaves_nothing_behind() -> None:
    store = store_of(max_traces=1)
    for number in range(1, 100):
        store.add(packed(a_span(1, trace=number, request_id=f"request-{number}")))
    one = store.num_bytes
    store.add(packed(a_span(1, trace=100, request_id="request-100")))
    assert len(store) == 1
    assert abs(store.num_bytes - one) < 5
    with pytest.raises(NotFound, match="request-5"):
        await store.get("request-5", ADMIN)


async def test_a_request_id_that_is_used_again_belongs_to_the_newer_trace() -> None:
    store = store_of(max_traces=2)
    store.add(packed(a_span(1, trace=1, request_id="mine")))
    store.add(packed(a_span(1, trace=2, request_id="mine")))
    store.add(packed(a_span(1, trace=3)))
    assert (await store.get("mine", ADMIN)).trace_id == trace_id(2)


def of(tenant: str) -> Access:
    return Access(Tenant(name=tenant))


def a_request(number: int, trace: int, tenant: str, request_id: str) -> Span:
    return a_span(number, trace, request_id=request_id, tenant=tenant)


async def test_a_trace_is_its_tenants_and_the_admins() -> None:
    store = store_of()
    store.add(packed(a_request(1, 1, "acme", "one"), a_request(2, 2, "bolt", "two")))
    store.add(packed(a_span(3, trace=3, name="beat")))
    assert [each.trace_id for each in await store.recent(10, of("acme"))] == [trace_id(1)]
    assert len(await store.recent(10, ADMIN)) == 3
    assert (await store.get("one", of("acme"))).trace_id == trace_id(1)
    for key in ("one", trace_id(1), trace_id(3)):
        with pytest.raises(NotFound):
            await store.get(key, of("bolt"))


async def test_adding_to_a_trace_does_not_show_it() -> None:
    store = store_of()
    store.add(packed(a_request(1, 1, "acme", "one"), a_request(2, 1, "bolt", "two")))
    for tenant in ("acme", "bolt"):
        assert await store.recent(10, of(tenant)) == []
    assert (await store.get("two", ADMIN)).trace_id == trace_id(1)


async def test_a_request_id_that_two_tenants_chose_means_each_ones_own() -> None:
    store = store_of(max_traces=2)
    store.add(packed(a_request(1, 1, "acme", "same")))
    store.add(packed(a_request(1, 2, "bolt", "same")))
    assert (await store.get("same", of("acme"))).trace_id == trace_id(1)
    assert (await store.get("same", of("bolt"))).trace_id == trace_id(2)
    store.add(packed(a_span(1, trace=3)))
    with pytest.raises(NotFound):
        await store.get("same", of("acme"))


async def test_a_look_at_many_traces_does_not_hold_the_event_loop() -> None:
    store = store_of(max_traces=10_000)
    for trace in range(1, 5000):
        store.add(packed(a_request(1, trace, "bolt", f"two-{trace}"), a_span(2, trace)))
    store.add(packed(a_request(1, 5000, "acme", "one")))
    for look in (store.recent(50, of("acme")), store.get("one", of("acme"))):
        looking = asyncio.ensure_future(look)
        num_turns = 0
        while not looking.done():
            num_turns += 1
            await asyncio.sleep(0)
        assert looking.result()
        assert num_turns > 5, "all in one turn"
        for trace in range(1, 5000):
            store.add(packed(a_span(3, trace), a_span(4, trace)))


async def test_a_trace_that_is_full_still_has_its_tenant() -> None:
    store = store_of(max_trace_spans=1)
    store.add(packed(a_span(1), a_request(2, 1, "acme", "one")))
    assert (await store.get(trace_id(1), of("acme"))).dropped_spans == 1


async def test_the_summary_says_what_the_first_span_was_and_how_it_went() -> None:
    store = store_of()
    failed = a_span(2, start_ns=15, parent=1)
    failed.status.code = Status.STATUS_CODE_ERROR
    store.add(packed(failed, service="worker"))
    store.add(packed(a_span(1, name="http", start_ns=10, route="/v1/models")))
    (summary,) = await store.recent(10, ADMIN)
    assert (summary.name, summary.attributes) == ("http", {"route": "/v1/models"})
    assert (summary.start_ns, summary.end_ns, summary.num_spans) == (10, 25, 2)
    assert summary.services == ["gateway", "worker"]
    assert summary.has_error


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff not protobuf",
        b"\x0a",
        b"\x0a\x05\x12\x03",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x0a\x06\x12\x04\x12\x02ab",
    ],
)
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(DecodeError):
        store_of().add(garbage)


async def test_a_span_that_is_garbage_behind_its_trace_id_is_dropped_when_it_is_read() -> None:
    store = store_of()
    good = packed(a_span(1, request_id="one"))
    store.add(good)
    broken = b"\x0a\x10" + (1).to_bytes(16, "big") + b"\x12\xff\xff"
    of_scope = b"\x12" + bytes([len(broken)]) + broken
    of_resource = b"\x12" + bytes([len(of_scope)]) + of_scope
    store.add(b"\x0a" + bytes([len(of_resource)]) + of_resource)
    shown = await store.get("one", ADMIN)
    assert (len(shown.spans), shown.dropped_spans) == (1, 1)


def client_of(store: TraceStore) -> httpx.AsyncClient:
    app = FastAPI()
    app.include_router(traces_router(store))

    @app.middleware("http")
    async def identify(request: Request, call_next: RequestResponseEndpoint) -> Response:
        attach(request.scope, RequestContext(RequestId("x"), False, 0.0, ADMIN))
        return await call_next(request)

    @app.exception_handler(TokenMeshError)
    async def answer(_request: Request, error: TokenMeshError) -> JSONResponse:
        return JSONResponse({"error": {"message": error.message}}, error.status)

    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


async def test_the_routes_answer_json() -> None:
    store = store_of()
    store.add(packed(a_span(1, name="http", request_id="chatcmpl-1", start_ns=5)))
    async with client_of(store) as client:
        trace = (await client.get("/traces/chatcmpl-1")).json()
        listed = (await client.get("/traces?limit=1")).json()
        missing = await client.get("/traces/chatcmpl-2")
        absurd = await client.get("/traces?limit=0")
    assert trace == {
        "trace_id": trace_id(1),
        "request_id": "chatcmpl-1",
        "dropped_spans": 0,
        "spans": [
            {
                "name": "http",
                "service": "gateway",
                "instance": "gateway-1",
                "span_id": f"{1:016x}",
                "parent_id": None,
                "start_ns": 5,
                "end_ns": 15,
                "attributes": {"tokenmesh.request_id": "chatcmpl-1"},
                "events": [],
                "status": "unset",
                "status_message": "",
            }
        ],
    }
    assert [each["request_id"] for each in listed["traces"]] == ["chatcmpl-1"]
    assert missing.status_code == 404
    assert "chatcmpl-2" in missing.json()["error"]["message"]
    assert absurd.status_code == 422


def filtered_store() -> TraceStore:
    """Three requests of two tenants and models at 1, 2 and 3 s, and a trace without a request."""
    store = store_of()
    requests = (("acme", "small", 200), ("bolt", "large", 429), ("acme", "large", 200))
    for number, (tenant, model, status) in enumerate(requests, 1):
        span = a_request(number, number, tenant, f"request-{number}")
        span.attributes.append(attribute("tokenmesh.model", model))
        span.attributes.append(attribute("http.response.status_code", status))
        span.start_time_unix_nano = number * 10**9
        span.end_time_unix_nano = number * 10**9 + number * 10**6
        store.add(packed(span))
    store.add(packed(a_span(4, 4, name="ping", start_ns=4 * 10**9)))
    return store


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", [4, 3, 2, 1]),
        ("requests_only=true", [3, 2, 1]),
        ("status=ok&requests_only=true", [3, 1]),
        ("status=failed", [2]),
        ("status=429", [2]),
        ("status=200&model=large", [3]),
        ("model=small", [1]),
        ("tenant=bolt", [2]),
        ("tenant=acme&limit=1", [3]),
        ("since_s=2&until_s=3", [3, 2]),
        ("min_ms=2.5", [3]),
    ],
)
async def test_the_list_of_traces_is_filtered(query: str, expected: list[int]) -> None:
    async with client_of(filtered_store()) as client:
        traces = (await client.get(f"/traces?{query}")).json()["traces"]
    assert [int(each["trace_id"], 16) for each in traces] == expected


@pytest.mark.parametrize(
    "query", ["status=good", "since_s=-1", "until_s=nan", "min_ms=x", "min_ms=inf", "min_ms=nan"]
)
async def test_a_filter_that_cannot_match_is_refused(query: str) -> None:
    async with client_of(store_of()) as client:
        assert (await client.get(f"/traces?{query}")).status_code == 422


async def test_a_filter_shows_nothing_of_other_tenants() -> None:
    chosen = TraceFilter(tenant="bolt")
    assert await filtered_store().recent(10, of("acme"), chosen) == []


async def test_an_error_that_arrives_later_is_in_the_list() -> None:
    store = store_of()
    store.add(packed(a_span(1, request_id="one")))
    assert not (await store.recent(1, ADMIN))[0].has_error
    failed = a_span(2, parent=1)
    failed.status.code = Status.STATUS_CODE_ERROR
    store.add(packed(failed))
    assert (await store.recent(1, ADMIN, TraceFilter(status="failed")))[0].num_spans == 2
