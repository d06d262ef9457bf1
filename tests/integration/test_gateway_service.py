"""The gateway as a service: its port, its socket options and draining."""

import asyncio
import contextlib
import json
import socket

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect

from tests.fakes.back_end import BackEnd
from tests.fakes.service_mesh import running
from tests.servers import free_port
from tokenmesh.services.gateway.core.http.server import listen
from tokenmesh.services.gateway.main import build
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.errors import ConfigError
from tokenmesh.shared.service import Mesh


def test_the_error_of_a_used_port_names_the_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="--port") as caught:
            listen(GatewaySettings(port=port))
    assert caught.value.param == "gateway.port"


async def until_refused(url: str) -> None:
    """Until the port is closed."""
    while True:
        try:
            async with httpx.AsyncClient(base_url=url) as client:
                with contextlib.suppress(httpx.ReadError, httpx.RemoteProtocolError):
                    await client.get("/livez")
        except httpx.ConnectError:
            return
        await asyncio.sleep(0.01)


def test_gateways_share_a_port_only_when_both_allow_it() -> None:
    shared = GatewaySettings(port=free_port(), reuse_port=True)
    with listen(shared), listen(shared), pytest.raises(ConfigError, match="in use"):
        listen(GatewaySettings(port=shared.port))


async def test_connections_are_spread_over_the_gateways_of_a_port(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    shared = GatewaySettings(port=free_port(), reuse_port=True)
    settings = Settings(bus=bus_settings, redis=redis_settings, gateway=shared)
    limits = httpx.Limits(max_keepalive_connections=0)
    url = f"http://127.0.0.1:{shared.port}"
    async with (
        running("gateway", settings, build) as first,
        running("gateway", settings, build) as second,
        httpx.AsyncClient(base_url=url, limits=limits) as client,
    ):
        for _ in range(64):
            assert (await client.get("/livez")).status_code == 200
        counts = num_asked(first), num_asked(second)
        assert sum(counts) == 64
        assert min(counts) > 0
        await second.drain(1.0)
        for _ in range(16):
            assert (await client.get("/livez")).status_code == 200
        assert num_asked(first) == counts[0] + 16


def num_asked(gateway: Mesh) -> int:
    """The number of /livez requests that it has served."""
    name = 'tokenmesh:http_requests_total{handler="/livez"'
    lines = gateway.metrics.render().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(name))


def test_a_key_in_clear_text_is_not_a_hash() -> None:
    with pytest.raises(ValueError, match="SHA-256"):
        GatewaySettings(api_key_hashes=("sk-secret",))


async def test_a_parser_plugin_that_cannot_be_imported_is_an_error_at_the_start(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    plugins = GatewaySettings(port=free_port(), parser_plugins={"own": "no.such.package:FORMAT"})
    settings = Settings(bus=bus_settings, redis=redis_settings, gateway=plugins)
    with pytest.raises(ConfigError, match=r"own=no\.such\.package:FORMAT") as caught:
        async with running("gateway", settings, build):
            pass
    assert caught.value.param == "parser_plugins"


async def test_a_gateway_that_leaves_without_a_drain_leaves_no_task(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    settings = Settings(
        bus=bus_settings, redis=redis_settings, gateway=GatewaySettings(port=free_port())
    )
    before = asyncio.all_tasks()
    async with running("gateway", settings, build):
        pass
    assert {task.get_name() for task in asyncio.all_tasks() - before} == set()


async def test_a_draining_gateway_finishes_requests_and_accepts_no_new_ones(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with BackEnd(bus_settings, redis_settings) as back_end:
        back_end.workers[0].hold()
        port = free_port()
        settings = Settings(
            bus=bus_settings, redis=redis_settings, gateway=GatewaySettings(port=port)
        )
        url = f"http://127.0.0.1:{port}"
        async with (
            running("gateway", settings, build) as mesh,
            httpx.AsyncClient(base_url=url, timeout=10) as client,
        ):
            await back_end.until(lambda: bool(mesh.members.workers(back_end.model)))
            body = {"model": back_end.model, "prompt": "Hi", "max_tokens": 100}
            answer = asyncio.create_task(client.post("/v1/completions", json=body))
            await back_end.until(lambda: len(back_end.workers[0].runs) == 1)
            draining = asyncio.create_task(mesh.drain(15.0))
            await back_end.until(lambda: mesh.draining)
            await until_refused(url)
            back_end.workers[0].release(burst=10)
            assert (await answer).json()["choices"][0]["text"].startswith("Hello")
            await draining


async def test_a_gateway_without_grace_cancels_running_requests(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with BackEnd(bus_settings, redis_settings) as back_end:
        back_end.workers[0].hold()
        settings = Settings(
            bus=bus_settings, redis=redis_settings, gateway=GatewaySettings(port=free_port())
        )
        async with (
            running("gateway", settings, build) as mesh,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.gateway.port}") as client,
        ):
            await back_end.until(lambda: bool(mesh.members.workers(back_end.model)))
            body = {"model": back_end.model, "prompt": "Hi", "max_tokens": 100}
            answer = asyncio.create_task(client.post("/v1/completions", json=body))
            await back_end.until(lambda: len(back_end.workers[0].runs) == 1)
            await mesh.drain(1.0)
            await back_end.until(lambda: len(back_end.workers[0].cancels) == 1)
            refused = await answer
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert refused.headers["retry-after"] == "1"


async def test_a_draining_gateway_finishes_a_realtime_response(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    create = json.dumps({"type": "response.create", "response": {"instructions": "Say."}})
    async with BackEnd(bus_settings, redis_settings) as back_end:
        back_end.workers[0].hold()
        settings = Settings(
            bus=bus_settings, redis=redis_settings, gateway=GatewaySettings(port=free_port())
        )
        url = f"ws://127.0.0.1:{settings.gateway.port}/v1/realtime?model={back_end.model}"
        async with running("gateway", settings, build) as mesh:
            await back_end.until(lambda: bool(mesh.members.workers(back_end.model)))
            async with connect(url) as socket, connect(url) as idle:
                await socket.send(create)
                await back_end.until(lambda: len(back_end.workers[0].runs) == 1)
                draining = asyncio.create_task(mesh.drain(15.0))
                await idle.wait_closed()
                assert idle.close_code == 1012
                await socket.send(create)
                assert "about to stop" in await next_event(socket, "error")
                back_end.workers[0].release(burst=10)
                done = json.loads(await next_event(socket, "response.done"))["response"]
                assert done["status"] == "completed"
                assert done["output"][0]["content"][0]["text"].startswith("Hello")
                await socket.wait_closed()
                assert socket.close_code == 1012
            await draining


async def next_event(socket: ClientConnection, kind: str) -> str:
    """The next event of that type."""
    while True:
        event = str(await socket.recv())
        if json.loads(event)["type"] == kind:
            return event
