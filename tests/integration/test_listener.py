"""Unix sockets, TLS with a certificate that changes, and the path of a proxy."""

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import certificates
from tests.fakes.back_end import BackEnd
from tests.servers import free_port
from tokenmesh.services.gateway.core.http.server import listen
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.errors import ConfigError

Serving = Any
KEY = "secret"


@pytest.fixture
def serving(bus_settings: BusSettings, redis_settings: RedisSettings) -> Serving:
    @asynccontextmanager
    async def serve(**settings: Any) -> AsyncIterator[BackEnd]:
        async with BackEnd(bus_settings, redis_settings, **settings) as back_end:
            yield back_end

    return serve


def body(back_end: BackEnd) -> dict[str, Any]:
    return {"model": back_end.model, "prompt": "Hi", "max_tokens": 5}


async def test_a_unix_socket_serves_and_is_removed_afterwards(
    serving: Serving, tmp_path: Path
) -> None:
    path = tmp_path / "gateway.sock"
    async with serving(uds=path) as back_end:
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.post("/v1/completions", json=body(back_end))
        assert answer.status_code == 200
        assert path.stat().st_mode & 0o777 == 0o660
        with pytest.raises(ConfigError, match="in use"):
            listen(GatewaySettings(uds=path))
    assert not path.exists()


async def test_the_stale_socket_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    listen(GatewaySettings(uds=path)).close()
    assert path.is_socket()
    listen(GatewaySettings(uds=path)).close()


async def test_small_writes_on_a_connection_are_sent_at_once() -> None:
    with listen(GatewaySettings(port=free_port())) as bound:
        accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
        async with await asyncio.start_server(lambda _, out: accepted.put(out), sock=bound):
            _, client = await asyncio.open_connection(*bound.getsockname())
            server = await asyncio.wait_for(accepted.get(), 5)
            connection = server.get_extra_info("socket")
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for each in (client, server):
                each.close()
                await each.wait_closed()


async def test_a_regular_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"gateway\.uds|notes"):
        listen(GatewaySettings(uds=path))
    assert path.read_text() == "mine"


async def _peer_certificate(url: str) -> str:
    host, port = url.removeprefix("https://").split(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))


async def test_tls_with_a_certificate_that_is_replaced(serving: Serving, tmp_path: Path) -> None:
    file = tmp_path / "server.pem"
    file.write_text(certificates.FIRST)
    context = ssl.create_default_context(cadata=certificates.FIRST)
    async with serving(ssl_certfile=file, ssl_refresh_s=0.02) as back_end:
        url = back_end.url.replace("http://", "https://")
        async with httpx.AsyncClient(base_url=url, verify=context) as client:
            answer = await client.post("/v1/completions", json=body(back_end))
            assert answer.status_code == 200
        assert await _peer_certificate(url) in certificates.FIRST
        file.write_text("not a certificate")
        os.utime(file, (1, 1))
        await asyncio.sleep(0.1)
        assert await _peer_certificate(url) in certificates.FIRST
        file.write_text(certificates.SECOND)
        os.utime(file, (2, 2))
        async with asyncio.timeout(15):
            while await _peer_certificate(url) not in certificates.SECOND:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_a_client_without_a_certificate_is_refused(serving: Serving, tmp_path: Path) -> None:
    file = tmp_path / "server.pem"
    file.write_text(certificates.FIRST)
    context = ssl.create_default_context(cadata=certificates.FIRST)
    async with serving(ssl_certfile=file, ssl_ca_certs=file) as back_end:
        url = back_end.url.replace("http://", "https://")
        async with httpx.AsyncClient(base_url=url, verify=context) as client:
            with pytest.raises(httpx.TransportError):
                await client.get("/version")
        context.load_cert_chain(file)
        async with httpx.AsyncClient(base_url=url, verify=context) as client:
            assert (await client.get("/version")).status_code == 200


async def test_a_broken_certificate_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ssl_certfile"):
        GatewaySettings(ssl_keyfile=tmp_path / "key.pem")


async def test_a_proxys_path_is_removed_where_it_is_present(serving: Serving) -> None:
    async with (
        serving(root_path="/llm", api_key_hashes=(sha256(KEY.encode()).hexdigest(),)) as back_end,
        httpx.AsyncClient(base_url=back_end.url) as client,
    ):
        for prefix in ("", "/llm"):
            assert (await client.get(f"{prefix}/livez")).status_code == 200
            assert (await client.get(f"{prefix}/v1/models")).status_code == 401
            answer = await client.post(f"{prefix}/v1/completions", json=body(back_end))
            assert answer.status_code == 401
        assert (await client.get("/llmx/livez")).status_code == 401
        key = {"authorization": f"Bearer {KEY}"}
        document = (await client.get("/llm/openapi.json", headers=key)).json()
        assert document["servers"] == [{"url": "/llm"}]
