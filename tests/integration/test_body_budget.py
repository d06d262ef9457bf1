"""Many large bodies at once are all served within the budget."""

import asyncio

import httpx
import pytest

from tests.fakes.back_end import BackEnd
from tokenmesh.services.gateway.core.http.body_budget import BodyBudget, Share
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

BUDGET = 256 * 1024
LARGE = "word " * (15 * 1024)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations", "/tokenize"])
async def test_large_bodies_stay_within_the_budget(
    bus_settings: BusSettings,
    redis_settings: RedisSettings,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = []
    give_back = BodyBudget.give_back

    def noted(bodies: BodyBudget, share: Share) -> None:
        held.append(bodies.num_held)
        give_back(bodies, share)

    monkeypatch.setattr(BodyBudget, "give_back", noted)
    async with BackEnd(bus_settings, redis_settings, body_budget_bytes=BUDGET) as mesh:
        talk = [{"role": "user", "content": "Hi"}]
        body = {"model": mesh.model, "messages": talk, "max_tokens": 2, "metadata": {"a": LARGE}}
        if path == "/tokenize":
            body = {"model": mesh.model, "prompt": LARGE}
        async with httpx.AsyncClient(base_url=mesh.url, timeout=15) as client:
            answers = await asyncio.gather(*(client.post(path, json=body) for _ in range(8)))
        assert {answer.status_code for answer in answers} == {200}
        assert len(LARGE) < max(held) <= BUDGET // 2
        assert mesh.gateway.core.tenancy.bodies.num_held == 0


async def test_a_share_is_returned_before_the_response_is_complete(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with BackEnd(bus_settings, redis_settings) as mesh:
        body = {"model": mesh.model, "prompt": "Hi", "user": LARGE, "stream": True}
        async with (
            httpx.AsyncClient(base_url=mesh.url, timeout=15) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            assert answer.status_code == 200
            assert mesh.gateway.core.tenancy.bodies.num_held == 0


async def test_the_wait_of_a_large_body_is_bounded(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with BackEnd(
        bus_settings, redis_settings, body_budget_bytes=BUDGET, body_wait_s=0.05
    ) as mesh:
        share = await mesh.gateway.core.tenancy.bodies.take("default", BUDGET)
        async with httpx.AsyncClient(base_url=mesh.url, timeout=15) as client:
            body = {"model": mesh.model, "prompt": LARGE}
            refused = await client.post("/v1/completions", json=body)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            short = await client.post("/v1/completions", json={**body, "prompt": "Hi"})
            assert short.status_code == 200
        mesh.gateway.core.tenancy.bodies.give_back(share)
        assert mesh.gateway.core.tenancy.bodies.num_held == 0
