"""Requests for embeddings while the process of a worker is killed and another one starts."""

import asyncio
from pathlib import Path
from typing import Any

from tests.fakes.small_mesh import SmallMesh
from tests.fakes.worker_process import joined, worker_process
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

TEXTS = [f"text {index}" for index in range(40)]
REQUESTS = 4


async def embeddings(mesh: SmallMesh) -> tuple[Any, Any]:
    """The vectors, and the usage."""
    body = {"model": mesh.model, "input": TEXTS}
    response = await mesh.client.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    return [each["embedding"] for each in answer["data"]], answer["usage"]


async def test_killing_a_worker_in_the_middle_of_requests_loses_nothing(
    tmp_path: Path, bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with SmallMesh(
        tmp_path,
        bus_settings,
        redis_settings,
        model={"runner": "pooling"},
        worker={"sim_step_s": 0.05, "max_num_batched_tokens": 16, "max_num_seqs": 16},
        gateway={"pool_batch_tokens": 64},
    ) as mesh:
        wanted = await embeddings(mesh)
        async with worker_process(tmp_path, mesh.settings) as process:
            (killed,) = await joined(mesh)
            requests = [asyncio.create_task(embeddings(mesh)) for _ in range(REQUESTS)]
            await mesh.until(lambda: mesh.load_of(killed).running > 0)
            process.kill()
        assert await asyncio.gather(*requests) == [wanted] * REQUESTS
        metrics = (await mesh.client.get("/metrics")).text
        assert 'tokenmesh:pool_retries_total{reason="lost"}' in metrics
        async with worker_process(tmp_path, mesh.settings):
            (again,) = await joined(mesh, (killed,))
            requests = [asyncio.create_task(embeddings(mesh)) for _ in range(REQUESTS)]
            await mesh.until(lambda: mesh.load_of(again).running > 0)
            assert await asyncio.gather(*requests) == [wanted] * REQUESTS
        metrics = (await mesh.client.get("/metrics")).text
        charged = 'tokenmesh:tenant_tokens_total{kind="prompt",tenant="default"} %.1f'
        assert charged % ((2 * REQUESTS + 1) * wanted[1]["total_tokens"]) in metrics
