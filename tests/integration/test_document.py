"""/openapi.json is complete, valid and correct."""

import json
from collections.abc import AsyncIterator, Iterable, Iterator
from hashlib import sha256
from typing import Any

import httpx
import jsonschema
import pytest
from starlette.routing import BaseRoute, Route, WebSocketRoute

from benchmarks.fuzz_run.schema import HIDDEN, operations
from tests.fakes.back_end import BackEnd
from tokenmesh.services.gateway.app import make_routes
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

KEY = "secret"


@pytest.fixture
async def mesh(bus_settings: BusSettings, redis_settings: RedisSettings) -> AsyncIterator[BackEnd]:
    hashes = (sha256(KEY.encode()).hexdigest(),)
    async with BackEnd(
        bus_settings,
        redis_settings,
        api_key_hashes=hashes,
        admin_routes=True,
        tokenizer_info=True,
        scale_out=True,
    ) as back_end:
        yield back_end


@pytest.fixture
async def client(mesh: BackEnd) -> AsyncIterator[httpx.AsyncClient]:
    key = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=mesh.url, headers=key, timeout=10) as http:
        yield http


_written: list[Any] = []
"""The document, which is the same for all tests, and which takes a second to write."""


@pytest.fixture
async def document(client: httpx.AsyncClient) -> Any:
    if not _written:
        _written.append((await client.get("/openapi.json")).json())
    return _written[0]


def _references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(_references(each) for each in value.values()))
    if isinstance(value, list):
        return set().union(*(_references(each) for each in value))
    return set()


def test_every_reference_resolves(document: Any) -> None:
    schemas = document["components"]["schemas"]
    assert _references(document) <= {f"#/components/schemas/{name}" for name in schemas}
    for name, schema in schemas.items():
        jsonschema.Draft202012Validator.check_schema(schema), name


def test_every_operation_describes_its_errors_and_its_key(document: Any) -> None:
    operations = {
        (path, method): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert len(operations) > 20
    for (path, _), operation in operations.items():
        assert {"200", "4XX", "5XX"} <= operation["responses"].keys()
        is_open = path in ("/health", "/livez", "/readyz", "/ping")
        assert ("security" in operation) is not is_open
    chat = operations["/v1/chat/completions", "post"]["responses"]["200"]["content"]
    assert chat.keys() == {"application/json", "text/event-stream"}


def _all_routes(routes: Iterable[BaseRoute]) -> Iterator[BaseRoute]:
    """FastAPI keeps the routes of a router that was included in that router."""
    for route in routes:
        router = getattr(route, "original_router", None)
        if router is None:
            yield route
        else:
            yield from _all_routes(router.routes)


async def test_the_fuzzer_attacks_every_route(mesh: BackEnd, document: Any) -> None:
    app = make_routes(mesh.gateway)
    found = list(_all_routes(app.routes))
    routes = {
        (method, route.path_format)
        for route in found
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert routes == {(each.method, each.path) for each in (*operations(document), *HIDDEN)}
    # Realtime sessions have their own fuzzer.
    sockets = [each.path for each in found if isinstance(each, WebSocketRoute)]
    assert sockets == ["/v1/realtime"]


def _check(document: Any, answer: httpx.Response, path: str, status: str = "200") -> None:
    method = answer.request.method.lower()
    content = document["paths"][path][method]["responses"][status]["content"]
    schema = {**content["application/json"]["schema"], "components": document["components"]}
    jsonschema.validate(answer.json(), json.loads(json.dumps(schema)))


async def test_responses_match_the_document(
    mesh: BackEnd, client: httpx.AsyncClient, document: Any
) -> None:
    chat = {"model": mesh.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
    prompt = {"model": mesh.model, "prompt": "Hi", "logprobs": 1, "max_tokens": 4}
    for path, body in (
        ("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 2}),
        ("/v1/completions", prompt),
        ("/v1/messages", chat),
        ("/v1/messages/count_tokens", chat),
        ("/tokenize", {"model": mesh.model, "prompt": "Hi"}),
    ):
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        _check(document, answer, path)
        _check(document, await client.post(path, json={"model": 3}), path, "4XX")
    _check(document, await client.get("/v1/models"), "/v1/models")


async def test_scale_out_responses_match_the_document(
    mesh: BackEnd, client: httpx.AsyncClient, document: Any
) -> None:
    chat = {"model": mesh.model, "messages": [{"role": "user", "content": "Hi"}]}
    prompt = {"model": mesh.model, "prompt": "Hi"}
    rendered = await client.post("/v1/chat/completions/render", json=chat)
    _check(document, rendered, "/v1/chat/completions/render")
    several = await client.post("/v1/completions/render", json=prompt)
    _check(document, several, "/v1/completions/render")
    body = {**rendered.json(), "stream": False}
    generated = await client.post("/inference/v1/generate", json=body)
    _check(document, generated, "/inference/v1/generate")
    derender = {"generate_response": generated.json(), "prompt_token_ids": body["token_ids"]}
    path = "/v1/chat/completions/derender"
    _check(document, await client.post(path, json=derender), path)
    choice = {"index": 0, "token_ids": [50]}
    chunk = {"stream": True, "generate_chunk": {"choices": [choice]}}
    _check(document, await client.post(path, json=chunk), path)
    abort = await client.post("/inference/v1/abort_requests", json={"request_ids": ["r"]})
    assert (abort.status_code, abort.content) == (200, b"")
    for route in ("/inference/v1/generate", path, "/v1/responses/render"):
        _check(document, await client.post(route, json={"model": 3}), route, "4XX")


async def test_stored_responses_and_batches_match_the_document(
    mesh: BackEnd, client: httpx.AsyncClient, document: Any
) -> None:
    made = await client.post("/v1/responses", json={"model": mesh.model, "input": "Hi"})
    _check(document, made, "/v1/responses")
    path, described = f"/v1/responses/{made.json()['id']}", "/v1/responses/{response_id}"
    _check(document, await client.get(path), described)
    assert "text/event-stream" in document["paths"][described]["get"]["responses"]["200"]["content"]
    _check(document, await client.get(f"{path}/input_items"), f"{described}/input_items")
    late = await client.post(f"{path}/cancel")
    _check(document, late, f"{described}/cancel", "4XX")
    begun = {"model": mesh.model, "input": "Hi", "background": True}
    other = (await client.post("/v1/responses", json=begun)).json()["id"]
    cancelled = await client.post(f"/v1/responses/{other}/cancel")
    assert cancelled.status_code == 200
    _check(document, cancelled, f"{described}/cancel")
    _check(document, await client.delete(path), described)
    _check(document, await client.get(path), described, "4XX")
    chats = [[{"role": "user", "content": "Hi"}]] * 2
    batch = {"model": mesh.model, "messages": chats, "max_tokens": 3}
    answer = await client.post("/v1/chat/completions/batch", json=batch)
    assert answer.status_code == 200, answer.text
    _check(document, answer, "/v1/chat/completions/batch")
    for described in ("Response", "ResponseDeleted", "InputItems"):
        assert f"responses.{described}" in document["components"]["schemas"]


@pytest.mark.parametrize(
    ("model", "field", "nothing", "something"),
    [
        ("ChatRequest", "audio", {}, {"voice": "alloy"}),
        ("ChatRequest", "functions", None, [{}]),
        ("ChatRequest", "web_search_options", None, {}),
        ("ChatRequest", "watermarking", False, True),
        ("ChatRequest", "service_tier", "auto", "flex"),
        ("CompletionRequest", "best_of", 1, 0),
        ("CompletionRequest", "mm_payload", "tensors", ""),
    ],
)
def test_an_unsupported_field_allows_only_values_without_effect(
    document: Any, model: str, field: str, nothing: Any, something: Any
) -> None:
    properties = document["components"]["schemas"][model]["properties"]
    jsonschema.validate(nothing, properties[field])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(something, properties[field])


def test_bounds_of_queries_are_described(document: Any) -> None:
    path = document["paths"]["/v1/responses/{response_id}/input_items"]
    limit = next(each for each in path["get"]["parameters"] if each["name"] == "limit")["schema"]
    assert (limit["minimum"], limit["maximum"]) == (1, 100)
    month = document["paths"]["/v1/usage"]["get"]["parameters"][0]["schema"]
    jsonschema.validate("2026-11", month)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate("", month)


async def test_a_file_has_one_of_the_purposes_that_openai_knows(client: httpx.AsyncClient) -> None:
    for purpose, status in (("vision", 200), ("1", 400)):
        form = {"data": {"purpose": purpose}, "files": {"file": ("a.png", b"PNG")}}
        answer = await client.post("/v1/files", **form)  # type: ignore[arg-type]
        assert answer.status_code == status


async def test_a_wrong_method_gets_the_allowed_ones(client: httpx.AsyncClient) -> None:
    answer = await client.put("/v1/files/some-id")
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET, HEAD")
    answer = await client.get("/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


async def test_an_empty_prompt_names_its_field(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json={"model": mesh.model, "prompt": ""})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
