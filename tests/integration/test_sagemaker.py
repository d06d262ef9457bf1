"""/ping and /invocations: the task's own route answers."""

import json
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.fakes.back_end import BackEnd
from tests.servers import Server, bus_settings_of, redis_settings_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "secret"
PATH = "/invocations"
TALK = [{"role": "user", "content": "Hi"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(nats_server: Server, redis_server: Server) -> AsyncIterator[BackEnd]:
    hashes = (sha256(KEY.encode()).hexdigest(),)
    bus, redis = bus_settings_of(nats_server), redis_settings_of(redis_server)
    async with BackEnd(bus, redis, api_key_hashes=hashes) as back_end:
        yield back_end


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: BackEnd) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=10) as http:
        http.headers["authorization"] = f"Bearer {KEY}"
        yield http


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "kind"),
    [({"messages": TALK}, "chat.completion"), ({"prompt": "Hi"}, "text_completion")],
)
async def test_a_body_goes_to_the_route_of_its_task(
    mesh: BackEnd, client: httpx.AsyncClient, fields: dict[str, Any], kind: str, is_stream: bool
) -> None:
    # A key by that name further down decides nothing.
    body = {"metadata": {"messages": [1], "prompt": 2}, "model": mesh.model, **fields}
    response = await client.post(PATH, json={**body, "max_tokens": 3, "stream": is_stream})
    assert response.status_code == 200, response.text
    first = response.text.split("\n")[0].removeprefix("data: ")
    assert json.loads(first)["object"].startswith(kind)
    assert response.text.endswith("data: [DONE]\n\n") is is_stream


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (b'{"model": "m"}', 400, "Cannot find suitable handler for request"),
        (b'{"messages": 5}', 400, "messages"),
        (b'{"prompt": "Hi", "n": 0}', 400, "n: "),
        (b"[]", 400, ""),
        (b'{"messages":', 400, "JSON"),
        (b'{"x":' + b"[" * 10_000 + b"]" * 10_000 + b"}", 400, "nested"),
        (b'{"x": "' + b"x" * 9_000_000 + b'"}', 413, "larger"),
        # Counted before it is looked through for its task.
        (b'{"x": [' + b"1," * 300_000 + b'"a"]}', 413, "values"),
    ],
)
async def test_errors_are_those_of_that_route(
    mesh: BackEnd, client: httpx.AsyncClient, data: bytes, status: int, words: str
) -> None:
    headers = {"content-type": "application/json"}
    response = await client.post(PATH, content=data, headers=headers)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]


async def test_a_ping_needs_no_key_and_an_invocation_does(mesh: BackEnd) -> None:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=10) as stranger:
        pings = [await stranger.request(method, "/ping") for method in ("GET", "POST")]
        # The fakes send no beats of a tokenizer and a scheduler: what matters is that it answers.
        health = await stranger.get("/health")
        assert [each.status_code for each in pings] == [health.status_code] * 2
        assert [each.json() for each in pings] == [health.json()] * 2
        assert (await stranger.post(PATH, json={"prompt": "Hi"})).status_code == 401
