"""Lists of prompts beyond the mesh's capacity: each is read as soon as it has a worker."""

import json
from pathlib import Path

from tests.fakes.small_mesh import SmallMesh
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

NUM_PROMPTS = 8


async def test_running_prompts_are_read_while_others_wait(
    bus_settings: BusSettings, redis_settings: RedisSettings, tmp_path: Path
) -> None:
    async with SmallMesh(
        tmp_path,
        bus_settings,
        redis_settings,
        worker={"max_num_seqs": 2},
        gateway={"max_buffered_tokens": 64},
    ) as mesh:
        # Each alone fits the buffer, what the first ones bring before the last is placed does not.
        prompts = [f"Hi {number}" for number in range(NUM_PROMPTS)]
        fields = {"prompt": prompts, "max_tokens": 32, "ignore_eos": True}
        response = await mesh.complete(**fields)
        assert response.status_code == 200, response.text
        assert len(response.json()["choices"]) == NUM_PROMPTS
        assert response.json()["usage"]["completion_tokens"] == NUM_PROMPTS * 32


async def test_a_stream_begins_before_the_last_prompt_has_a_worker(
    bus_settings: BusSettings, redis_settings: RedisSettings, tmp_path: Path
) -> None:
    worker = {"max_num_seqs": 1, "sim_step_s": 0.01}
    async with SmallMesh(tmp_path, bus_settings, redis_settings, worker=worker) as mesh:
        body = {
            "model": mesh.model,
            "prompt": [f"Hi {number}" for number in range(NUM_PROMPTS)],
            "max_tokens": 32,
            "ignore_eos": True,
            "stream": True,
        }
        waiting, ended = "", set()
        async with mesh.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                waiting = waiting or mesh.scheduler.metrics.render().decode()
                if line.startswith("data: {"):
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        ended |= {choice["index"]} if choice["finish_reason"] else set()
        assert ended == set(range(NUM_PROMPTS))
        assert "tokenmesh:placement_waiting 0.0" not in waiting


async def test_a_prompt_that_cannot_be_placed_ends_the_response(
    bus_settings: BusSettings, redis_settings: RedisSettings, tmp_path: Path
) -> None:
    async with SmallMesh(
        tmp_path,
        bus_settings,
        redis_settings,
        worker={"max_num_seqs": 1, "sim_step_s": 0.01},
        scheduler={"max_queued": 2},
    ) as mesh:
        prompts = [f"Hi {number}" for number in range(NUM_PROMPTS)]
        response = await mesh.complete(prompt=prompts, max_tokens=400, ignore_eos=True)
        assert response.status_code == 429
        assert response.headers["retry-after"]
        await mesh.until(lambda: all(each.running == 0 for each in mesh.loads()))
