"""Everything behind a gateway is gone for seconds: requests of that time wait, and are answered."""

import asyncio
import signal
from pathlib import Path

import pytest

from benchmarks.chaos_run.child import Child
from benchmarks.chaos_run.cluster import Cluster
from tokenmesh.cli.bench.client import Reply, Target
from tokenmesh.cli.bench.workload import first_model
from tokenmesh.cli.embedded.private import private_folder
from tokenmesh.shared.config.loader import load_settings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

NUM_TOKENS = 20
GONE_S = 1.5
"""Longer than five attempts at a question, and than it takes to see that workers do not beat."""


async def send(server: Target, model: str) -> Reply:
    body = {
        "model": model,
        "prompt": [100, 101, 102],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = await server.connect()
    try:
        return await connection.send(server.request("POST", "/v1/completions", body))
    finally:
        connection.close()


async def bring_back(children: list[Child]) -> None:
    for child in children:
        await child.wait_end(5.0)
        await child.start()
    await asyncio.gather(*(child.wait_ready() for child in children))


async def test_requests_outlast_a_hole_behind_their_gateway(tmp_path: Path) -> None:
    settings = load_settings(
        None,
        {
            "worker": {"engine": "sim", "sim_step_s": 0.01},
            "constants": {"worker": {"hand_over_s": 0.5}},
            "service": {"drain_grace_s": 1.0},
            "up": {"workers": 2},
        },
    )
    with private_folder() as folder:
        cluster = Cluster(settings, folder, tmp_path, num_gateways=1)
        try:
            await cluster.start()
            server = Target(cluster.urls[0], None)
            model = await first_model(server)
            assert (await send(server, model)).status == 200
            first, second = cluster.of("worker")
            first.send(signal.SIGTERM)
            behind = [second, *cluster.of("tokenizer"), *cluster.of("scheduler")]
            for child in behind:
                child.send(signal.SIGKILL)
            at_once = [asyncio.create_task(send(server, model)) for _ in range(3)]
            await asyncio.sleep(GONE_S)
            later = [asyncio.create_task(send(server, model)) for _ in range(3)]
            (nats,) = cluster.of("nats")
            nats.send(signal.SIGKILL)
            await bring_back([nats])
            await bring_back([first, *behind])
            for reply in await asyncio.gather(*at_once, *later):
                assert (reply.status, reply.error, reply.is_done) == (200, None, True)
                assert reply.usage is not None
                assert reply.usage.completion_tokens == NUM_TOKENS
        finally:
            await cluster.stop()
