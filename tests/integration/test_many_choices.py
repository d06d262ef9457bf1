"""Several choices of one prompt: one that is late or refused does not delay the others."""

import httpx

from tests.fakes.back_end import BackEnd, saying
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings


async def test_choices_are_read_while_another_looks_for_a_worker(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    text = "so many words " * 8
    async with (
        BackEnd(bus_settings, redis_settings, saying(text), max_buffered_tokens=16) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=10) as client,
    ):
        mesh.workers[0].faults.refuses_number = 2
        # The second choice is placed anew, which takes longer than all of the first one.
        mesh.scheduler.delays_s = [0.0, 1.0]
        body = {"model": mesh.model, "prompt": "Hi", "n": 3, "max_tokens": 64}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        texts = [choice["text"] for choice in response.json()["choices"]]
        assert texts == [texts[0]] * 3
        assert texts[0].startswith("so many words")


async def test_a_choice_that_cannot_be_placed_ends_the_response_at_once(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        BackEnd(bus_settings, redis_settings) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=10) as client,
    ):
        mesh.workers[0].faults.refuses = True
        body = {"model": mesh.model, "prompt": "Hi", "n": 3, "max_tokens": 8}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "overloaded"
        await mesh.until(lambda: not len(mesh.gateway.core.mesh.streams))
