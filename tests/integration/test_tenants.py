"""Tenants over HTTP: limits, headers, usage exact to the token for every kind of request."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.back_end import BackEnd, saying
from tests.fakes.key_file import key_entry
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings


class Rig:
    """A gateway whose key file has four tenants, with new names for each test."""

    def __init__(self, mesh: BackEnd, mark: str) -> None:
        self.mesh = mesh
        self.mark = mark

    def client(self, tenant: str) -> httpx.AsyncClient:
        key = {"authorization": f"Bearer sk-{tenant}-{self.mark}"}
        return httpx.AsyncClient(base_url=self.mesh.url, headers=key, timeout=10)

    async def post(self, tenant: str, path: str, **body: Any) -> httpx.Response:
        async with self.client(tenant) as client:
            return await client.post(path, json={"model": self.mesh.model, **body})

    async def usage(self, tenant: str = "free") -> dict[str, Any]:
        async with self.client(tenant) as client:
            response = await client.get("/v1/usage")
        assert response.status_code == 200
        shown: dict[str, Any] = response.json()
        return shown


def key_file(mark: str) -> str:
    lines = [
        f"[tenants.free-{mark}]",
        f"[tenants.slow-{mark}]\nrequests_per_minute = 2\ntokens_per_minute = 5000",
        f"[tenants.spent-{mark}]\nmonthly_tokens = 1",
        f"[tenants.ops-{mark}]\nadmin = true",
    ]
    names = ("free", "slow", "spent", "ops")
    return "\n".join(
        [*lines, *(key_entry(f"sk-{name}-{mark}", f"{name}-{mark}") for name in names)]
    )


@pytest.fixture
async def rig(
    bus_settings: BusSettings, redis_settings: RedisSettings, tmp_path: Path
) -> AsyncIterator[Rig]:
    mark = secrets.token_hex(4)
    path = tmp_path / "keys.toml"
    path.write_text(key_file(mark))
    async with BackEnd(bus_settings, redis_settings, keys_file=path, keys_refresh_s=0.05) as mesh:
        yield Rig(mesh, mark)


CHAT = [{"role": "user", "content": "Hi"}]


async def test_every_kind_of_request_is_charged_the_usage_reported_to_its_client(rig: Rig) -> None:
    prompt = completion = 0
    for path, body in (
        ("/v1/chat/completions", {"messages": CHAT, "n": 3}),
        ("/v1/completions", {"prompt": ["a", "b c"], "n": 2}),
        ("/v1/chat/completions/batch", {"messages": [CHAT, CHAT]}),
    ):
        shown = (await rig.post("free", path, **body)).json()["usage"]
        prompt, completion = (
            prompt + shown["prompt_tokens"],
            completion + shown["completion_tokens"],
        )
    for path, body in (
        ("/v1/messages", {"messages": CHAT, "max_tokens": 8}),
        ("/v1/responses", {"input": "Hi", "store": False}),
        ("/v1/responses", {"input": "Hi", "store": True}),
    ):
        shown = (await rig.post("free", path, **body)).json()["usage"]
        # Anthropic's input_tokens are without those that were read from or written to the cache.
        of_cache = ("cache_read_input_tokens", "cache_creation_input_tokens")
        prompt += shown["input_tokens"] + sum(shown.get(name, 0) for name in of_cache)
        completion += shown["output_tokens"]
    usage = await rig.usage()
    (model,) = usage["models"]
    assert model["requests"] == 6
    assert (model["prompt_tokens"], model["completion_tokens"]) == (prompt, completion)
    assert usage["total_tokens"] == prompt + completion
    assert usage["tokens_left"] is None


async def test_a_client_that_leaves_is_charged_for_the_tokens_generated_so_far(rig: Rig) -> None:
    rig.mesh.workers[0].script = saying("word " * 100)
    rig.mesh.workers[0].step_s = 0.02
    body = {"model": rig.mesh.model, "messages": CHAT, "stream": True}
    async with (
        rig.client("free") as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        heard = 0
        async for line in response.aiter_lines():
            heard += '"content":' in line
            if heard == 5:
                break
    async with asyncio.timeout(15):
        while not (usage := await rig.usage())["total_tokens"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert usage["models"][0]["prompt_tokens"] > 0
    assert heard - 1 <= usage["models"][0]["completion_tokens"] < 100


async def test_a_request_that_fails_before_its_first_token_is_not_charged(rig: Rig) -> None:
    rig.mesh.scheduler.is_full = True
    assert (await rig.post("free", "/v1/chat/completions", messages=CHAT)).status_code == 429
    assert (await rig.usage())["total_tokens"] == 0


async def test_limits_are_in_headers_and_refusals_have_openais_shape(rig: Rig) -> None:
    for left in ("1", "0"):
        response = await rig.post("slow", "/v1/chat/completions", messages=CHAT)
        assert response.status_code == 200
        assert response.headers["x-ratelimit-limit-requests"] == "2"
        assert response.headers["x-ratelimit-remaining-requests"] == left
        assert response.headers["x-ratelimit-limit-tokens"] == "5000"
    for path, body in (
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/responses", {"input": "Hi", "background": True, "store": True}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 4}),
    ):
        refused = await rig.post("slow", path, **body)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 31
    error = (await rig.post("slow", "/v1/chat/completions", messages=CHAT)).json()["error"]
    assert (error["type"], error["code"]) == ("RateLimitError", "rate_limit_exceeded")
    assert (await rig.post("spent", "/v1/completions", prompt="x")).status_code == 200
    await rig.usage("spent")
    spent = await rig.post("spent", "/v1/completions", prompt="x")
    assert (spent.status_code, spent.json()["error"]["code"]) == (429, "insufficient_quota")
    assert (await rig.usage("spent"))["tokens_left"] == 0


async def test_only_admins_see_all_tenants(rig: Rig) -> None:
    await rig.post("free", "/v1/completions", prompt="x")
    async with rig.client("free") as client:
        refused = await client.get("/v1/usage/tenants")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        wrong = await client.get("/v1/usage?month=2026-13")
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "month")
    async with rig.client("ops") as client:
        shown = (await client.get("/v1/usage/tenants")).json()["data"]
    tokens = {each["tenant"]: each["total_tokens"] for each in shown}
    assert set(tokens) == {
        "default",
        *(f"{n}-{rig.mark}" for n in ("free", "slow", "spent", "ops")),
    }
    assert tokens[f"free-{rig.mark}"] > 0


async def test_the_tenant_travels_and_its_clients_cannot_outrank_others(rig: Rig) -> None:
    await rig.post("free", "/v1/completions", prompt="x", priority=-100)
    place = rig.mesh.scheduler.received[-1]
    assert (place.tenant, place.tenant_priority) == (f"free-{rig.mark}", 0)
    assert (place.priority, place.weight) == (-100, 1.0)
    generate = rig.mesh.workers[0].generates[-1]
    assert (generate.tenant, generate.tenant_priority) == (place.tenant, 0)
    assert (generate.priority, generate.weight) == (-100, 1.0)


async def test_keys_change_without_a_restart(rig: Rig) -> None:
    path = rig.mesh.settings.gateway.keys_file
    assert path is not None
    path.write_text(key_file("other"))
    async with rig.client("free") as client:
        async with asyncio.timeout(15):
            while (await client.get("/v1/models")).status_code != 401:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
