"""Usage is what clients received, to the token, whatever happens to the processes behind them."""

import asyncio
import json
import signal
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.chaos_run.child import Child
from benchmarks.chaos_run.cluster import Cluster
from tests.fakes.key_file import key_entry
from tokenmesh.cli.bench.client import Target
from tokenmesh.cli.bench.workload import first_model
from tokenmesh.cli.embedded.private import private_folder
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.loader import load_settings

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(120)]

TENANTS = ("one", "two")
CONCURRENCY = 8
OUTAGE_S = 2.0


def settings_of(folder: Path) -> Settings:
    lines = [f"[tenants.{name}]\n{key_entry(name, name)}" for name in TENANTS]
    (folder / "keys.toml").write_text("\n".join(lines))
    return load_settings(
        None,
        {
            "worker": {"engine": "sim", "sim_step_s": 0.01, "max_num_seqs": 8},
            "gateway": {"keys_file": str(folder / "keys.toml")},
            "service": {"drain_grace_s": 1.0},
            "up": {"workers": 2, "schedulers": 2},
        },
    )


class Clients:
    """Send requests and add up the usage that they report."""

    def __init__(self, urls: list[str], model: str) -> None:
        self._urls = urls
        self._model = model
        self._dice = Random(5)
        self.shown = {tenant: Counter[str]() for tenant in TENANTS}

    async def send(self, tenant: str) -> None:
        dice = self._dice
        prompt = dice.choice([list(range(100, 164)), dice.choices(range(70, 900), k=40)])
        body = {
            "model": self._model,
            "prompt": prompt,
            "n": dice.choice([1, 1, 2, 3]),
            "max_tokens": dice.randint(5, 90),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        server = Target(dice.choice(self._urls), tenant)
        connection = await server.connect()
        reply = await connection.send(server.request("POST", "/v1/completions", body))
        connection.close()
        assert (reply.status, reply.error, reply.is_done) == (200, None, True)
        usage = reply.usage
        assert usage is not None
        details = usage.prompt_tokens_details
        self.shown[tenant].update(
            requests=1,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=details.cached_tokens if details else 0,
            completion_tokens=usage.completion_tokens,
        )

    async def run(self, others: asyncio.Task[None]) -> None:
        """Repeat while faults go on."""

        async def repeat(tenant: str) -> None:
            while not others.done():
                await self.send(tenant)

        async with asyncio.TaskGroup() as group:
            for number in range(CONCURRENCY):
                group.create_task(repeat(TENANTS[number % 2]))


async def kill(child: Child) -> None:
    child.send(signal.SIGKILL)
    await child.wait_end(5.0)
    await child.start()
    await child.wait_ready()


async def disturb(cluster: Cluster) -> None:
    """Workers and a scheduler die; Redis stands still, and forgets nothing."""
    (redis,) = cluster.of("redis")
    for child in (cluster.of("worker")[0], cluster.of("scheduler")[0], cluster.of("worker")[1]):
        await kill(child)
    redis.send(signal.SIGSTOP)
    await asyncio.sleep(OUTAGE_S)
    redis.send(signal.SIGCONT)
    await kill(cluster.of("worker")[0])


async def usage_of(url: str, tenant: str) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(await Target(url, tenant).fetch("GET", "/v1/usage"))
    return shown


async def counted(cluster: Cluster, tenant: str) -> Counter[str]:
    # each gateway tells Redis what it has before it answers
    answers = [await usage_of(url, tenant) for url in (*cluster.urls, cluster.urls[0])]
    (model,) = answers[-1]["models"]
    assert answers[-1]["total_tokens"] == model["prompt_tokens"] + model["completion_tokens"]
    return Counter({kind: value for kind, value in model.items() if kind != "model"})


async def test_usage_is_the_sum_of_what_clients_received(tmp_path: Path) -> None:
    with private_folder() as folder:
        cluster = Cluster(settings_of(folder), folder, tmp_path, num_gateways=2)
        try:
            await cluster.start()
            model = await first_model(Target(cluster.urls[0], TENANTS[0]))
            clients = Clients(cluster.urls, model)
            disturbing = asyncio.create_task(disturb(cluster))
            await clients.run(disturbing)
            await disturbing
            for tenant in TENANTS:
                assert await counted(cluster, tenant) == clients.shown[tenant]
                assert clients.shown[tenant]["completion_tokens"] > 1000
        finally:
            await cluster.stop()
