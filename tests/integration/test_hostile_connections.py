"""Connections that request tunnels and upgrades, pipeline thousands, or never stop sending."""

import asyncio
import gc
import http.client
import json
from collections.abc import AsyncIterator

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tests.fakes.back_end import BackEnd
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

PATIENCE_S = 10.0
MEBIBYTE = 1024 * 1024
METHODS = (
    *("DELETE", "GET", "HEAD", "POST", "PUT", "CONNECT", "OPTIONS", "TRACE", "COPY", "LOCK"),
    *("MKCOL", "MOVE", "PROPFIND", "SEARCH", "UNLOCK", "REPORT", "MERGE", "M-SEARCH", "NOTIFY"),
    *("SUBSCRIBE", "PATCH", "PURGE", "MKCALENDAR", "LINK", "SOURCE", "PRI", "DESCRIBE", "SETUP"),
)
UPGRADES = (
    "",
    "Connection: Upgrade\r\nUpgrade: h2c\r\n",
    "Connection: Upgrade\r\nUpgrade: websocket\r\n",
    "Connection: Upgrade\r\nUpgrade: TLS/1.0, HTTP/1.1\r\n",
    "Connection: upgrade, close\r\nUpgrade:\r\n",
)


@pytest.fixture
async def mesh(bus_settings: BusSettings, redis_settings: RedisSettings) -> AsyncIterator[BackEnd]:
    async with BackEnd(bus_settings, redis_settings, keep_alive_s=1, linger_s=0.5) as back_end:
        yield back_end


def _address(mesh: BackEnd) -> tuple[str, int]:
    host, port = mesh.url.partition("://")[2].split(":")
    return host, int(port)


async def _send(mesh: BackEnd, data: bytes) -> bytes:
    """The beginning of the response."""
    reader, writer = await asyncio.open_connection(*_address(mesh))
    writer.write(data)
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read(4096)
    writer.transport.abort()
    return answer


@pytest.mark.parametrize("target", ["a:80", "/livez", "http://a/"])
async def test_connect_is_refused_and_the_gateway_continues(mesh: BackEnd, target: str) -> None:
    answer = await _send(mesh, f"CONNECT {target} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    assert answer.startswith((b"HTTP/1.1 405 ", b"HTTP/1.1 400 "))
    assert b" 200 OK" in await _send(mesh, b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")


@pytest.mark.parametrize("upgrade", UPGRADES)
async def test_every_method_with_every_upgrade_gets_a_response(mesh: BackEnd, upgrade: str) -> None:
    requests = [
        f"{method} /livez HTTP/{version}\r\nHost: x\r\n{upgrade}Content-Length: 0\r\n\r\n"
        for method in METHODS
        for version in ("1.1", "1.0")
    ]
    answers = await asyncio.gather(*(_send(mesh, each.encode()) for each in requests))
    assert all(each.startswith(b"HTTP/1.1 ") for each in answers)
    assert not any(each.startswith(b"HTTP/1.1 5") for each in answers)


async def test_a_websocket_cannot_take_over_a_busy_connection(
    mesh: BackEnd,
) -> None:
    body = json.dumps({"model": mesh.model, "prompt": "Hi"}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
    upgrade = (
        b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    )
    answer = await _send(mesh, request % (len(body), body) + upgrade + b"\r\n")
    assert b"101 Switching" not in answer
    assert b" 200 OK" in await _send(mesh, b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")


async def test_a_flood_of_pipelined_requests_stays_bytes(mesh: BackEnd) -> None:
    """Sixteen requests are queued; the thousands after them are not parsed."""
    asked = b"GET /livez HTTP/1.1\r\n\r\n"
    reader, writer = await asyncio.open_connection(*_address(mesh))
    writer.write(asked * 20_000)
    async with asyncio.timeout(PATIENCE_S):
        await reader.readexactly(20_000)
    assert _num_requests() < 1000
    writer.transport.abort()


def _num_requests() -> int:
    """The requests in memory."""
    return sum(isinstance(each, RequestResponseCycle) for each in gc.get_objects())


def _post(mesh: BackEnd, body: bytes, path: str, kind: str) -> tuple[int, bytes]:
    """From a blocking client that reads only after it has sent everything."""
    client = http.client.HTTPConnection(*_address(mesh), timeout=PATIENCE_S)
    client.request("POST", path, body, {"Content-Type": kind, "Connection": "close"})
    answer = client.getresponse()
    return answer.status, answer.read()


@pytest.mark.parametrize(
    ("path", "kind", "refusal"),
    [
        ("/v1/completions", "application/json", (413, b"larger than")),
        ("/v1/files", "multipart/form-data; boundary=b", (400, b"form is broken")),
    ],
)
async def test_a_client_that_sends_too_much_reads_the_refusal(
    mesh: BackEnd, path: str, kind: str, refusal: tuple[int, bytes]
) -> None:
    status, body = await asyncio.to_thread(_post, mesh, b"x" * (24 * MEBIBYTE), path, kind)
    assert status == refusal[0]
    assert refusal[1] in body


async def test_a_client_that_still_sends_garbage_reads_the_error(
    mesh: BackEnd,
) -> None:
    reader, writer = await asyncio.open_connection(*_address(mesh))
    writer.write(b"not http\r\n\r\n" + b"x" * (4 * MEBIBYTE))
    await writer.drain()
    async with asyncio.timeout(PATIENCE_S):
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    writer.close()


async def test_a_client_that_never_stops_sending_is_disconnected(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with BackEnd(bus_settings, redis_settings, linger_bytes=MEBIBYTE) as mesh:
        _, writer = await asyncio.open_connection(*_address(mesh))
        writer.write(b"not http\r\n\r\n")
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(_send_on(writer), PATIENCE_S)
        writer.transport.abort()


async def _send_on(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()
