"""Slow, large, broken and too many connections on a real port."""

import asyncio
import gc
import json
import logging
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.fakes.back_end import BackEnd, ignore_generate
from tokenmesh.services.gateway.core.http.connection import HttpConnection
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

Serving = Any
PATIENCE_S = 10.0
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def serving(bus_settings: BusSettings, redis_settings: RedisSettings) -> Serving:
    @asynccontextmanager
    async def serve(**settings: Any) -> AsyncIterator[BackEnd]:
        async with BackEnd(bus_settings, redis_settings, **settings) as back_end:
            yield back_end

    return serve


class Raw:
    """A client that sends raw bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def all(self) -> bytes:
        """All bytes until the server closes."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read()

    async def answer(self) -> bytes:
        """One response with a length."""
        async with asyncio.timeout(PATIENCE_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
            return head + await self.reader.readexactly(int(fields[b"content-length"]))


@asynccontextmanager
async def raw(back_end: BackEnd) -> AsyncIterator[Raw]:
    host, port = back_end.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Raw(reader, writer)
    finally:
        writer.transport.abort()


def asking(back_end: BackEnd, **fields: Any) -> bytes:
    body = json.dumps({"model": back_end.model, "prompt": "Hi", **fields}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def refused(back_end: BackEnd, kind: str) -> float:
    lines = back_end.gateway.core.metrics.render().decode().splitlines()
    found = [each for each in lines if "refused_connections_total" in each and kind in each]
    return sum(float(each.rsplit(" ", 1)[1]) for each in found)


def error_of(response: bytes, status: int) -> dict[str, Any]:
    assert response.startswith(b"HTTP/1.1 %d " % status), response[:100]
    error: dict[str, Any] = json.loads(response.partition(b"\r\n\r\n")[2])["error"]
    return error


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTT", b"\r\n", LIVEZ[:-2]])
async def test_an_incomplete_header_times_out(serving: Serving, sent: bytes) -> None:
    async with serving(header_timeout_s=0.2) as back_end, raw(back_end) as client:
        await client.send(sent)
        assert error_of(await client.all(), 408)["type"] == "RequestTimeoutError"
        assert refused(back_end, "slow header") == 1


@pytest.mark.parametrize("sent", [b"\r\n", LIVEZ[:20]])
async def test_every_header_has_a_time_limit(serving: Serving, sent: bytes) -> None:
    async with serving(header_timeout_s=0.2) as back_end, raw(back_end) as client:
        await client.send(LIVEZ)
        assert b"200 OK" in await client.answer()
        await asyncio.sleep(0.4)
        await client.send(sent)
        await client.all()
        assert refused(back_end, "slow header") == 1


async def test_a_header_is_bounded_however_it_arrives(serving: Serving) -> None:
    line = b"X-A: " + b"a" * 1000 + b"\r\n"
    async with serving(max_header_bytes=4096) as back_end:
        for header in (line * 8, b"X-A: " + b"a" * 8192, b"\xff: " * 3000):
            async with raw(back_end) as client:
                await client.send(LIVEZ[:-2] + header)
                await client.send(b"X-B: " + b"b" * 8192)
                assert error_of(await client.all(), 431 if header[0] == 88 else 400)
        async with raw(back_end) as client:
            await client.send(LIVEZ[:-2] + line * 8 + b"\r\n")
            assert error_of(await client.all(), 431)
        async with raw(back_end) as client:
            await client.send(LIVEZ[:-2] + line * 3 + b"\r\n")
            assert b"200 OK" in await client.answer()


async def test_garbage_gets_an_error_body_and_one_log_line(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving() as back_end:
        for _ in range(20):
            async with raw(back_end) as client:
                await client.send(b"\x16\x03\x01 garbage\r\n\r\n")
                assert error_of(await client.all(), 400)["type"] == "BadRequestError"
        assert refused(back_end, "garbage") == 20
    said = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len([each for each in said if "garbage" in each or "nvalid" in each]) == 1


async def test_connections_over_the_limit_get_503(serving: Serving) -> None:
    async with serving(max_connections=2) as back_end:
        async with raw(back_end) as first, raw(back_end) as second, raw(back_end) as third:
            assert error_of(await third.all(), 503)["type"] == "ServiceUnavailableError"
            for client in (first, second):
                await client.send(LIVEZ)
                assert b"200 OK" in await client.answer()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async with raw(back_end) as client:
                    await client.send(LIVEZ)
                    if b"200 OK" in await client.answer():
                        break


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("pause_s", [0.0, 0.1])
async def test_a_disconnect_of_a_pipelining_client_is_noticed(
    serving: Serving, is_stream: bool, pause_s: float
) -> None:
    async with serving(script=ignore_generate([5] * 200)) as back_end:
        back_end.workers[0].step_s = 1.0
        async with raw(back_end) as client:
            await client.send(asking(back_end, stream=is_stream))
            await asyncio.sleep(pause_s)
            await client.send(LIVEZ + LIVEZ)
            await back_end.until(lambda: len(back_end.gateway.core.mesh.streams) == 1, PATIENCE_S)
        await back_end.until(lambda: len(back_end.gateway.core.mesh.streams) == 0, PATIENCE_S)


def num_connections() -> int:
    return sum(type(each) is HttpConnection for each in gc.get_objects())


@pytest.mark.parametrize("sent", [LIVEZ, b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_a_reset_connection_is_freed_at_once(serving: Serving, sent: bytes) -> None:
    """Without waiting for the idle timeout or the garbage collector."""
    async with serving() as back_end:
        gc.collect()
        gc.disable()
        try:
            before = num_connections()
            for _ in range(20):
                async with raw(back_end) as client:
                    await client.send(sent)
                    await client.answer()
                    # a reset instead of an end
                    linger = struct.pack("ii", 1, 0)
                    client.writer.get_extra_info("socket").setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, linger
                    )
            async with asyncio.timeout(PATIENCE_S):
                while num_connections() > before:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()


async def test_pipelined_requests_are_answered_in_order(serving: Serving) -> None:
    async with serving(max_pipelined=2) as back_end, raw(back_end) as client:
        await client.send(asking(back_end, max_tokens=3) + LIVEZ * 40)
        assert b"text_completion" in await client.answer()
        for _ in range(40):
            assert b"200 OK" in await client.answer()


async def test_an_unknown_upgrade_is_ignored(serving: Serving) -> None:
    async with serving() as back_end, raw(back_end) as client:
        upgrade = b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Type:"
        request = asking(back_end, max_tokens=3).replace(b"Content-Type:", upgrade)
        for half in (len(request) // 2, request.index(b"{"), len(request) - 2):
            await client.send(request[:half])
            await asyncio.sleep(0.05)
            await client.send(request[half:])
            assert b"text_completion" in await client.answer()


async def test_many_upgrades_at_once_are_many_requests(serving: Serving) -> None:
    """The parser starts again for each; a thousand in one packet must not recurse."""
    asked = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    async with serving(max_pipelined=4000) as back_end, raw(back_end) as client:
        await client.send(asked * 3000)
        for _ in range(3000):
            assert (await client.answer()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length : 5\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding:\x0bchunked\r\n",
        b"X: a\r\n folded: b\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"X: a\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"X: a\rTransfer-Encoding: chunked\r\nContent-Length: 5\r\n",
    ],
)
@pytest.mark.parametrize("upgrade", [b"", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"])
async def test_an_ambiguous_header_is_refused(
    serving: Serving, head: bytes, upgrade: bytes
) -> None:
    async with serving() as back_end, raw(back_end) as client:
        await client.send(b"POST /livez HTTP/1.1\r\nHost: x\r\n" + upgrade + head + b"\r\n")
        await client.send(b"0\r\n\r\nGET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await client.all()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"\r\n\r\n") == 1
