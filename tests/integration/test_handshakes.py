"""TLS handshakes that are never finished, on a real port."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes import certificates
from tests.fakes.back_end import BackEnd
from tokenmesh.shared.config.bus import BusSettings
from tokenmesh.shared.config.redis import RedisSettings

PATIENCE_S = 10.0
Tls = tuple[BackEnd, ssl.SSLContext]


def _address(mesh: BackEnd) -> tuple[str, int]:
    host, port = mesh.url.partition("://")[2].split(":")
    return host, int(port)


@pytest.fixture
async def tls(
    bus_settings: BusSettings, redis_settings: RedisSettings, tmp_path: Path
) -> AsyncIterator[Tls]:
    file = tmp_path / "certificate.pem"
    file.write_text(certificates.FIRST)
    async with BackEnd(
        bus_settings,
        redis_settings,
        max_handshakes=4,
        handshake_timeout_s=1.0,
        ssl_certfile=file,
    ) as back_end:
        yield back_end, ssl.create_default_context(cadata=certificates.FIRST)


async def test_the_oldest_silent_one_makes_room(tls: Tls) -> None:
    mesh, context = tls
    silent = [await asyncio.open_connection(*_address(mesh)) for _ in range(8)]
    async with asyncio.timeout(0.9):
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


async def test_a_silent_one_has_its_time(tls: Tls) -> None:
    mesh, _ = tls
    reader, writer = await asyncio.open_connection(*_address(mesh))
    began_s = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read() == b""
    assert time.monotonic() - began_s > 0.5
    writer.close()


async def test_a_request_right_behind_the_handshake_is_not_lost(tls: Tls) -> None:
    mesh, context = tls
    for _ in range(20):
        reader, writer = await asyncio.open_connection(
            *_address(mesh), ssl=context, server_hostname="localhost"
        )
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert b" 200 OK" in await reader.read()
        writer.close()
