"""Unfinished TLS handshakes on a real port."""

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes import certificates
from tests.fakes.back_end import BackEnd
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

PATIENCE_S = 10.0
Tls = tuple[BackEnd, ssl.SSLContext]


def _address(mesh: BackEnd) -> tuple[str, int]:
    host, port = mesh.url.partition("://")[2].split(":")
    return host, int(port)


@pytest.fixture(params=[60.0])
async def tls(
    request: pytest.FixtureRequest,
    bus_settings: BusSettings,
    redis_settings: RedisSettings,
    tmp_path: Path,
) -> AsyncIterator[Tls]:
    file = tmp_path / "certificate.pem"
    file.write_text(certificates.FIRST)
    async with BackEnd(
        bus_settings,
        redis_settings,
        max_handshakes=4,
        handshake_timeout_s=request.param,
        ssl_certfile=file,
    ) as back_end:
        yield back_end, ssl.create_default_context(cadata=certificates.FIRST)


async def test_the_oldest_silent_handshake_is_closed_first(tls: Tls) -> None:
    mesh, context = tls
    silent = [await asyncio.open_connection(*_address(mesh)) for _ in range(8)]
    async with asyncio.timeout(PATIENCE_S):
        ended = [await reader.read() for reader, _ in silent[:4]]
    assert ended == [b""] * 4
    reader, writer = await asyncio.open_connection(
        *_address(mesh), ssl=context, server_hostname="localhost"
    )
    writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        assert b" 200 OK" in await reader.read(4096)
    writer.transport.abort()
    for _, each in silent:
        each.transport.abort()


async def test_a_started_handshake_is_preferred_to_silent_ones(tls: Tls) -> None:
    """A stream of silent connections must not displace honest clients."""
    mesh, context = tls
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        session.do_handshake()
    hello = outgoing.read()
    reader, writer = await asyncio.open_connection(*_address(mesh))
    writer.write(hello[:20])
    await asyncio.sleep(0.1)
    silent = [await asyncio.open_connection(*_address(mesh)) for _ in range(12)]
    writer.write(hello[20:])
    async with asyncio.timeout(PATIENCE_S):
        while True:
            data = await reader.read(65536)
            assert data, "the server has closed an honest connection"
            incoming.write(data)
            with contextlib.suppress(ssl.SSLWantReadError):
                session.do_handshake()
                break
    session.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    writer.write(outgoing.read())
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read(65536)
    for each in (writer, *(writer for _, writer in silent)):
        each.transport.abort()


async def test_the_first_bytes_may_arrive_one_by_one(tls: Tls) -> None:
    mesh, context = tls
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        session.do_handshake()
    reader, writer = await asyncio.open_connection(*_address(mesh))
    for byte in outgoing.read():
        writer.write(bytes([byte]))
        await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read(65536)
    writer.transport.abort()


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\n\r\n"])
async def test_a_connection_closed_before_its_handshake_is_forgotten(
    tls: Tls, first: bytes
) -> None:
    mesh, context = tls
    for _ in range(8):
        _, writer = await asyncio.open_connection(*_address(mesh))
        writer.write(first)
        writer.close()
        await writer.wait_closed()
    reader, writer = await asyncio.open_connection(
        *_address(mesh), ssl=context, server_hostname="localhost"
    )
    writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        assert b" 200 OK" in await reader.read(4096)
    writer.transport.abort()


@pytest.mark.parametrize("tls", [1.0], indirect=True)
async def test_a_silent_handshake_times_out(tls: Tls) -> None:
    mesh, _ = tls
    reader, writer = await asyncio.open_connection(*_address(mesh))
    began_s = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read() == b""
    assert time.monotonic() - began_s > 0.5
    writer.close()


async def test_a_request_right_after_the_handshake_is_not_lost(tls: Tls) -> None:
    mesh, context = tls
    for _ in range(20):
        reader, writer = await asyncio.open_connection(
            *_address(mesh), ssl=context, server_hostname="localhost"
        )
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert b" 200 OK" in await reader.read()
        writer.close()
