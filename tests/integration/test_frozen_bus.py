"""NATS is frozen: no worker counts as dead, and no stream migrates."""

import asyncio
import signal
from collections.abc import Callable

import httpx
import pytest

from tests.fakes.back_end import BackEnd, ignore_generate
from tests.servers import Server, bus_settings_of
from tokenmesh.services.gateway.core.mesh.session import SessionState
from tokenmesh.shared.config.mesh import RedisSettings

IDS = [5] * 200


@pytest.mark.parametrize("frozen_s", [0.4, 1.5])
async def test_no_stream_migrates_while_nats_is_frozen(
    start_nats: Callable[[], Server], redis_settings: RedisSettings, frozen_s: float
) -> None:
    nats = start_nats()
    assert nats.process is not None
    async with BackEnd(bus_settings_of(nats), redis_settings, script=ignore_generate(IDS)) as mesh:
        await mesh.add_worker()
        mesh.workers[0].step_s = 0.01
        body = {"model": mesh.model, "prompt": "Hi", "max_tokens": 200, "return_token_ids": True}
        async with httpx.AsyncClient(base_url=mesh.url, timeout=15) as client:
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            streams = mesh.gateway.core.mesh.streams
            await mesh.until(lambda: any(s.session.token_ids for s in streams.all()))
            (stream,) = streams.all()
            nats.process.send_signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(frozen_s)
            finally:
                nats.process.send_signal(signal.SIGCONT)
            answer = await asking
        assert answer.json()["choices"][0]["token_ids"] == IDS
        assert stream.session.attempt == 0
        assert stream.session.state is SessionState.ENDED
        assert [len(each.generates) for each in mesh.workers] == [1, 0]


async def test_a_worker_that_hangs_while_nats_answers_is_found(
    start_nats: Callable[[], Server], redis_settings: RedisSettings
) -> None:
    async with BackEnd(
        bus_settings_of(start_nats()), redis_settings, script=ignore_generate(IDS)
    ) as mesh:
        await mesh.add_worker()
        mesh.workers[0].faults.hangs_after = 10
        body = {"model": mesh.model, "prompt": "Hi", "max_tokens": 200, "return_token_ids": True}
        async with httpx.AsyncClient(base_url=mesh.url, timeout=15) as client:
            answer = await client.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["token_ids"] == IDS
        assert [len(each.generates) for each in mesh.workers] == [1, 1]
