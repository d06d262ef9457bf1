"""Redis is away for a minute: no request may fail, and the hit rate must be back soon after.

Starts a mesh of its own (two of each service, `sim` workers) and asks it at a fixed rate for
prompts of a few families, each with a beginning of its own that some worker has cached. Kills
Redis, starts it again, empty, and goes on for a while. All that time requests of a tenant with
limits, stored responses, /health and /metrics are asked for on every gateway, too. Ends with 1 when
anything failed or the hit rate is not back at `--share` of what it was within `--within` seconds.
"""

import argparse
import asyncio
import hashlib
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import uvloop
from rich.console import Console

from benchmarks.chaos_run.cluster import Cluster
from benchmarks.options import add_cluster_options
from benchmarks.outage_run.edges import Edges
from benchmarks.outage_run.recovery import Moments, Recovery, recovery_of
from benchmarks.replay_run.player import PlayedRequest, Player
from benchmarks.replay_run.prompts import Prompts
from benchmarks.replay_run.trace import BLOCK_TOKENS, Entry
from benchmarks.serve.results import environment, write_json
from tokenmesh.cli.bench.client import Target
from tokenmesh.cli.bench.workload import first_model
from tokenmesh.cli.embedded.private import private_folder
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.loader import DEMO_MODEL, load_settings

KEY = "a tenant's key"
TENANT = f"""\
[tenants.acme]
requests_per_minute = 1_000_000
tokens_per_minute = 1_000_000_000
max_concurrent = 10_000
monthly_tokens = 1_000_000_000_000

[[keys]]
sha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}"
tenant = "acme"
"""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Times are seconds."""
    parser = argparse.ArgumentParser(description=__doc__, prog="outage")
    add = parser.add_argument
    add("--before", type=float, default=30.0, help="with Redis; the second half is compared with")
    add("--outage", type=float, default=60.0)
    add("--after", type=float, default=30.0)
    add("--within", type=float, default=15.0, help="the hit rate must be back by then")
    add("--share", type=float, default=0.95, help="of the hit rate before")
    add("--rate", type=float, default=12.0, help="requests a second")
    add("--families", type=int, default=32, help="prompts that begin alike")
    add("--prefix-blocks", type=int, default=4, help="of 512 tokens that a family shares")
    add("--cache-blocks", type=int, default=64, help="of 512 tokens that a worker holds")
    add("--workers", type=int, default=4)
    add("--gateways", type=int, default=2)
    add("--timeout", type=float, default=30.0, help="for one request")
    add_cluster_options(parser)
    return parser.parse_args(arguments)


def entries_of(options: argparse.Namespace) -> list[Entry]:
    """Requests at a fixed rate; what follows a family's beginning differs in every request."""
    random = Random(options.seed)
    seconds = options.before + options.outage + options.after
    entries = []
    for number in range(int(seconds * options.rate)):
        first = random.randrange(options.families) * options.prefix_blocks
        shared = [first + block for block in range(options.prefix_blocks)]
        entries.append(
            Entry(
                number * 1e3 / options.rate,
                options.prefix_blocks * BLOCK_TOKENS + BLOCK_TOKENS // 2,
                8,
                [*shared, 1_000_000 + number],
            )
        )
    return entries


def settings_of(options: argparse.Namespace, keys_file: Path) -> Settings:
    """The bundled model, simulated, with caches too small to hold every family."""
    pool_tokens = options.cache_blocks * BLOCK_TOKENS
    return load_settings(
        None,
        {
            "model": {"max_model_len": pool_tokens},
            "worker": {
                "engine": "sim",
                "block_size": 64,
                "num_gpu_blocks_override": pool_tokens // 64 + 1,
                "sim_prefill_tokens_per_s": 40_000.0,
            },
            "gateway": {"keys_file": str(keys_file)},
            "up": {"workers": options.workers, "tokenizers": 2, "schedulers": 2},
        },
    )


async def run(options: argparse.Namespace) -> tuple[list[PlayedRequest], Edges, Moments]:
    """Start, take Redis away, give it back, end. Raises RuntimeError."""
    with private_folder() as folder:
        logs = options.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        keys_file = folder / "keys.toml"
        keys_file.write_text(TENANT)
        cluster = Cluster(settings_of(options, keys_file), folder, logs, options.gateways)
        try:
            await cluster.start()
            return await play(options, cluster)
        finally:
            await cluster.stop()


async def play(
    options: argparse.Namespace, cluster: Cluster
) -> tuple[list[PlayedRequest], Edges, Moments]:
    """All requests, those alongside them, and when Redis was away."""
    servers = [Target(url, KEY) for url in cluster.urls]
    model = await first_model(servers[0])
    vocab_size = json.loads((DEMO_MODEL / "config.json").read_bytes())["vocab_size"]
    player = Player(servers, model, Prompts(vocab_size), speed=1.0, timeout_s=options.timeout)
    edges = Edges(servers, model, options.timeout)
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(edges.run())
        away = group.create_task(take_away(options, cluster, began_s))
        played = await player.play(entries_of(options))
        asking.cancel()
    return played, edges, away.result()


async def take_away(options: argparse.Namespace, cluster: Cluster, began_s: float) -> Moments:
    """Kill Redis and start it again, empty."""
    (redis,) = cluster.of("redis")
    await asyncio.sleep(options.before)
    left_s = time.perf_counter() - began_s
    redis.send(signal.SIGKILL)
    await redis.wait_end(1.0)
    await asyncio.sleep(options.outage)
    await redis.start()
    await redis.wait_ready()
    return Moments(left_s, time.perf_counter() - began_s)


def failures(played: Sequence[PlayedRequest], edges: Edges) -> dict[str, int]:
    """Count failures by kind."""
    found = dict(edges.failures)
    for each in played:
        if each.error is not None:
            found[f"completion: {each.error}"] = found.get(f"completion: {each.error}", 0) + 1
    return found


def report(
    options: argparse.Namespace, played: Sequence[PlayedRequest], edges: Edges, recovery: Recovery
) -> dict[str, object]:
    """The numbers as JSON."""
    return {
        "config": vars(options),
        "environment": environment(),
        "requests": len(played),
        "edges": dict(edges.answered),
        "failures": failures(played, edges),
        "late_max_s": round(max(each.late_s for each in played), 3),
        **recovery,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, report; 0 when everything held."""
    options = parse(arguments)
    console = Console(stderr=True)
    played, edges, moments = uvloop.run(run(options))
    recovery = recovery_of(played, moments, options.share)
    found = report(options, played, edges, recovery)
    for name, value in found.items():
        if name not in ("config", "environment"):
            console.print(f"{name}: {value}")
    if options.out:
        write_json(options.out, found)
    back_s = recovery["back_s"]
    return int(bool(found["failures"]) or back_s is None or back_s > options.within)


if __name__ == "__main__":
    sys.exit(main())
