"""Uploads whose client is slow or disconnects."""

import asyncio
from contextlib import suppress

import pytest

from tests.fakes.back_end import BackEnd
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

HEAD = (
    b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n"
    b"content-type: multipart/form-data; boundary=b\r\n\r\n"
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.png"\r\n\r\nhalf'
)


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def test_an_upload_that_stalls_is_refused(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with BackEnd(bus_settings, redis_settings, body_timeout_s=0.2) as mesh:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(mesh.url.split(":")[-1]))
        writer.write(HEAD)
        async with asyncio.timeout(10):
            assert b" 504 " in await reader.readline()
        await close(writer)


async def test_an_upload_whose_client_disconnects_does_not_crash(
    bus_settings: BusSettings, redis_settings: RedisSettings, caplog: pytest.LogCaptureFixture
) -> None:
    async with BackEnd(bus_settings, redis_settings) as mesh:
        _, writer = await asyncio.open_connection("127.0.0.1", int(mesh.url.split(":")[-1]))
        writer.write(HEAD)
        await writer.drain()
        await mesh.until(lambda: mesh.gateway.core.requests.num_open == 1)
        await close(writer)
        await mesh.until(lambda: mesh.gateway.core.requests.num_open == 0)
        assert 'handler="/v1/files",method="POST",status="499"' in mesh.metrics.render().decode()
    assert not [record for record in caplog.records if record.exc_info]
