"""/load, /server_info, /tokenizer_info and the metrics of HTTP, on a real gateway."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.fakes.back_end import BackEnd
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

KEY = "a secret key"
HASH = hashlib.sha256(KEY.encode()).hexdigest()


@pytest.fixture
async def mesh(bus_settings: BusSettings, redis_settings: RedisSettings) -> AsyncIterator[BackEnd]:
    settings: dict[str, Any] = {"admin_routes": True, "api_key_hashes": (HASH,)}
    async with BackEnd(bus_settings, redis_settings, **settings) as back_end:
        yield back_end


@pytest.fixture
async def client(mesh: BackEnd) -> AsyncIterator[httpx.AsyncClient]:
    key = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=mesh.url, headers=key, timeout=10) as http:
        yield http


async def test_load_counts_open_requests(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    assert (await client.get("/load")).json() == {"server_load": 0}
    mesh.workers[0].hold()
    body = {"model": mesh.model, "prompt": "Hi", "max_tokens": 4}
    waiting = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(3)]
    await mesh.until(lambda: len(mesh.workers[0].runs) == 3)
    assert (await client.get("/load")).json() == {"server_load": 3}
    mesh.workers[0].release(9)
    await asyncio.gather(*waiting)
    assert (await client.get("/load")).json() == {"server_load": 0}


async def test_server_info_has_settings_and_members_but_no_secret(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    answer = await client.get("/server_info")
    info = answer.json()
    assert info["settings"]["max_n"] == 128
    assert info["system"]["packages"]["msgspec"]
    assert HASH not in answer.text
    assert "api_key_hashes" not in info["settings"]
    assert [each["service"] for each in info["members"]] == ["worker"]
    assert info["members"][0]["models"] == [mesh.model]
    assert (await client.get("/server_info", headers={"authorization": ""})).status_code == 401


async def test_tokenizer_info_is_off_by_default(client: httpx.AsyncClient) -> None:
    assert (await client.get("/tokenizer_info")).status_code == 404


async def test_http_is_measured_by_handler(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    body = {"model": mesh.model, "prompt": "Hi", "max_tokens": 4, "n": 2}
    content = (await client.post("/v1/completions", json=body)).content
    await client.get("/no/such/path")
    text = (await client.get("/metrics")).text
    handler = 'handler="/v1/completions"'
    assert f'http_requests_total{{{handler},method="POST",status="200"}} 1.0' in text
    assert 'http_requests_total{handler="other",method="other",status="404"} 1.0' in text
    assert f'http_request_duration_seconds_count{{{handler},method="POST"}} 1.0' in text
    assert f"http_response_size_bytes_sum{{{handler}}} {float(len(content))}" in text
    assert f"http_request_size_bytes_count{{{handler}}} 1.0" in text
    labels = f'{{engine="{mesh.workers[0].id}",model_name="{mesh.model}"}}'
    assert f"tokenmesh:request_max_num_generation_tokens_sum{labels} 4.0" in text


async def test_models_have_a_permission(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    (model, alias) = (await client.get("/v1/models")).json()["data"]
    assert model["permission"][0]["allow_sampling"] is True
    assert (alias["root"], alias["parent"]) == (mesh.model, None)
