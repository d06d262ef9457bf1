"""HTTP from unusual clients and proxies."""

import asyncio
import gzip
import json

import httpx
import pytest

from tests.fakes.back_end import BackEnd
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

CHAT = "/v1/chat/completions"


def _body(mesh: BackEnd) -> bytes:
    chat = {"model": mesh.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    return json.dumps(chat).encode()


async def _exchange(mesh: BackEnd, head: str, *parts: bytes) -> bytes:
    """All bytes until the server closes."""
    host, port = mesh.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.replace("\n", "\r\n").encode())
    for part in parts:
        writer.write(part)
        await writer.drain()
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


async def test_a_body_in_chunks_is_read(mesh: BackEnd) -> None:
    body = _body(mesh)
    pieces = [body[i : i + 7] for i in range(0, len(body), 7)]
    chunks = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces]
    head = (
        f"POST {CHAT} HTTP/1.1\nHost: x\nContent-Type: application/json\nConnection: close\n"
        "Transfer-Encoding: chunked\n\n"
    )
    assert b" 200 " in (await _exchange(mesh, head, *chunks, b"0\r\n\r\n"))[:20]


async def test_a_client_that_waits_for_continue_gets_it(mesh: BackEnd) -> None:
    body = _body(mesh)
    head = (
        f"POST {CHAT} HTTP/1.1\nHost: x\nContent-Type: application/json\nConnection: close\n"
        f"Expect: 100-continue\nContent-Length: {len(body)}\n\n"
    )
    answer = await _exchange(mesh, head, body)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")


async def test_http_1_0_gets_a_whole_response(mesh: BackEnd) -> None:
    body = _body(mesh)
    head = f"POST {CHAT} HTTP/1.0\nContent-Type: application/json\nContent-Length: {len(body)}\n\n"
    headers, _, answer = (await _exchange(mesh, head, body)).partition(b"\r\n\r\n")
    assert b" 200 " in headers[:20]
    assert b"chunked" not in headers
    assert json.loads(answer)["object"] == "chat.completion"


async def test_http_1_0_gets_a_stream_without_chunks(mesh: BackEnd) -> None:
    body = _body(mesh)[:-1] + b', "stream": true}'
    head = f"POST {CHAT} HTTP/1.0\nContent-Type: application/json\nContent-Length: {len(body)}\n\n"
    headers, _, answer = (await _exchange(mesh, head, body)).partition(b"\r\n\r\n")
    assert b" 200 " in headers[:20]
    assert b"chunked" not in headers
    assert b"connection: close" in headers
    frames = answer.split(b"\n\n")
    assert all(frame.startswith(b"data: ") for frame in frames[:-1])
    assert frames[-2:] == [b"data: [DONE]", b""]


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/livez", "/metrics", "/openapi.json"])
async def test_head_is_served_where_get_is(client: httpx.AsyncClient, path: str) -> None:
    fetched, asked = await client.get(path), await client.head(path)
    assert (asked.status_code, asked.content) == (fetched.status_code, b"")
    assert asked.status_code != 405
    assert asked.headers.get("content-type") == fetched.headers.get("content-type")
    # the connection is still in step
    assert (await client.get(path)).content == fetched.content or path == "/metrics"


async def test_head_of_a_post_route_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.head(CHAT)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert (await client.post("/v1/models")).headers["allow"] == "GET, HEAD"


async def test_a_compressed_body_is_refused_by_its_encoding(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = await client.post(CHAT, content=gzip.compress(_body(mesh)), headers=headers)
    assert answer.status_code == 415
    assert "gzip" in answer.json()["error"]["message"]
    headers["content-encoding"] = "identity"
    assert (await client.post(CHAT, content=_body(mesh), headers=headers)).status_code == 200


async def test_models_are_listed_with_a_trailing_slash(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/models/")).json() == (await client.get("/v1/models")).json()


async def test_a_missing_route_is_named(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/edits", json={"input": "Hi"})
    assert answer.status_code == 404
    assert "POST /v1/edits" in answer.json()["error"]["message"]
    long = await client.get("/x" * 2000)
    assert len(long.json()["error"]["message"]) < 300


@pytest.mark.parametrize(
    "field", ["Authorization", "X-Api-Key", "Host", "Origin", "X-Request-Id", "Content-Type"]
)
async def test_a_duplicate_security_header_is_refused(mesh: BackEnd, field: str) -> None:
    fields = f"{field}: a\n{field}: b\n"
    host = "" if field == "Host" else "Host: x\n"
    answer = await _exchange(mesh, f"GET /v1/models HTTP/1.1\n{host}{fields}Connection: close\n\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert f"the header {field.lower()} is sent 2 times".encode() in answer


@pytest.mark.parametrize("root_path", ["", "/llm"])
async def test_the_root_redirects_to_the_console(
    bus_settings: BusSettings, redis_settings: RedisSettings, root_path: str
) -> None:
    async with BackEnd(
        bus_settings, redis_settings, root_path=root_path, api_key_hashes=("0" * 64,)
    ) as mesh:
        answer = await _exchange(mesh, "GET / HTTP/1.1\nHost: x\nConnection: close\n\n")
        assert answer.startswith(b"HTTP/1.1 307 ")
        assert f"location: {root_path}/console\r\n".encode() in answer
