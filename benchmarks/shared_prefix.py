"""Requests that share long beginnings, on a mesh of its own: does placement find what is cached?

64 prefixes of 1,024 tokens, four workers whose KV holds 24k tokens each, 16 requests at a time. A
prefix's home is drawn for each request, so no policy can hold everything everywhere. The length of
the rest and the number of requests are chosen such that round robin finds about 22 % and an ideal
sticky placement 68.7 % of all prompt tokens cached (`--policy prefix_hash` sticks by a hash, so its
workers are not evenly loaded). All services are real, only the model's time is simulated, and
nothing but the size of the KV differs from the defaults. Then the same with one worker that is
slower in everything. Exit code 1 when a gate is missed.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.chaos_run.cluster import Cluster
from benchmarks.options import add_cluster_options
from benchmarks.replay_run.player import PlayedRequest, Player
from benchmarks.replay_run.prompts import Prompts
from benchmarks.replay_run.score import score
from benchmarks.replay_run.trace import BLOCK_TOKENS, Entry
from benchmarks.serve.results import environment, write_json
from tokenmesh.cli.bench.client import Target
from tokenmesh.cli.bench.workload import first_model
from tokenmesh.cli.embedded.private import private_folder
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.loader import DEMO_MODEL, load_settings

PREFIXES: Final = 64
PREFIX_BLOCKS: Final = 2
KV_TOKENS: Final = 24_000
WORKERS: Final = 4
CONCURRENCY: Final = 16
OWN_TOKENS: Final = 200
OUTPUT_TOKENS: Final = 32
BOUND_S: Final = 1.0

OURS: Final = "estimated_ttft"
SLOWED: Final = "estimated_ttft, one slow"
POLICIES: Final = ("round_robin", "prefix_hash", "least_tokens", OURS)

LEAST_HIT_RATE: Final = 0.635
MOST_SLOWDOWN: Final = 1.5

Run = dict[str, Any]


def make_entries(count: int, seed: int) -> list[Entry]:
    """Requests with a prefix drawn at random and a rest of their own."""
    random = Random(seed)
    first_own = PREFIXES * PREFIX_BLOCKS
    length = PREFIX_BLOCKS * BLOCK_TOKENS + OWN_TOKENS
    entries = []
    for number in range(count):
        first = random.randrange(PREFIXES) * PREFIX_BLOCKS
        ids = [*range(first, first + PREFIX_BLOCKS), first_own + number]
        entries.append(Entry(0, length, OUTPUT_TOKENS, ids))
    return entries


def warm_up(count: int) -> list[Entry]:
    """Requests that share nothing: a worker's rates are known once it has computed something."""
    first = 1_000_000
    length = PREFIX_BLOCKS * BLOCK_TOKENS
    return [
        Entry(0, length, OUTPUT_TOKENS, [first + 2 * number, first + 2 * number + 1])
        for number in range(count)
    ]


def settings_of(policy: str) -> Settings:
    """The defaults, with a simulated engine and the scenario's KV."""
    block_size = 16
    worker = {
        "engine": "sim",
        "block_size": block_size,
        "num_gpu_blocks_override": KV_TOKENS // block_size + 1,
    }
    sections = {
        "worker": worker,
        "scheduler": {"policy": policy},
        "telemetry": {"sample_ratio": 0.0},
        "service": {"drain_grace_s": 1.0},
        "up": {"workers": WORKERS},
    }
    return load_settings(None, sections)


async def measure(policy: str, entries: list[Entry], slow: float, logs: Path | None) -> Run:
    """One run; `slow` is the factor on all times of the first worker."""
    environments = {"worker 1": {"TOKENMESH_WORKER__SIM_TIME_SCALE": str(slow)}}
    with private_folder() as folder:
        where = logs or folder
        where.mkdir(parents=True, exist_ok=True)
        cluster = Cluster(settings_of(policy), folder, where, 1, environments)
        try:
            await cluster.start()
            return await _play(cluster, entries)
        finally:
            await cluster.stop()


async def _play(cluster: Cluster, entries: list[Entry]) -> Run:
    server = Target(cluster.urls[0], None)
    prompts = Prompts(json.loads((DEMO_MODEL / "config.json").read_bytes())["vocab_size"])
    model = await first_model(server)
    player = Player([server], model, prompts, speed=1.0, timeout_s=60.0)
    await player.play_closed(warm_up(CONCURRENCY), CONCURRENCY)
    before = await _decoded(cluster, server)
    played = await player.play_closed(entries, CONCURRENCY)
    after = await _decoded(cluster, server)
    decoded = [after[name] - before[name] for name in before]
    return {**score(played, BOUND_S), "shares": _shares(decoded), "seconds": _seconds(played)}


async def _decoded(cluster: Cluster, server: Target) -> dict[str, int]:
    """Tokens that each worker has decoded, once its heartbeats show it."""
    await asyncio.sleep(4 * cluster.settings.service.worker_beat_interval_s)
    state = json.loads(await server.fetch("GET", "/mesh"))
    loads = {each["id"]: each["load"] for each in state["processes"]}
    return {each.name: loads[each.instance_id]["decode_tokens"] for each in cluster.of("worker")}


def _shares(decoded: Sequence[int]) -> list[float]:
    """Return the shares of the output tokens, the first worker's first."""
    return [round(each / max(1, sum(decoded)), 4) for each in decoded]


def _seconds(played: Sequence[PlayedRequest]) -> float:
    return round(max(each.due_s + each.ended_s for each in played), 2)


def failures(runs: Mapping[str, Run], slow: float) -> list[str]:
    """The gates that were missed, in words."""
    ours, slowed = runs[OURS], runs[SLOWED]
    fair = 1 / slow / (WORKERS - 1 + 1 / slow)
    ratio = slowed["ttft_p99"] / max(1e-9, ours["ttft_p99"])
    missed = []
    if ours["hit_rate"] < LEAST_HIT_RATE:
        missed.append(f"{ours['hit_rate']:.1%} cached, {LEAST_HIT_RATE:.1%} wanted")
    if slowed["shares"][0] > fair:
        missed.append(f"the slow worker served {slowed['shares'][0]:.1%}, its share is {fair:.1%}")
    if ratio >= MOST_SLOWDOWN:
        missed.append(f"TTFT p99 is {ratio:.2f} times that without the slow worker")
    errors = {name: run["errors"] for name, run in runs.items() if run["errors"]}
    return [*missed, f"requests failed: {errors}"] if errors else missed


def show(runs: Mapping[str, Run], console: Console) -> None:
    """A row a run."""
    table = Table("placement", "cached", "TTFT p50 ms", "p99 ms", "share of worker 1", "errors")
    for name, run in runs.items():
        table.add_row(
            name,
            f"{run['hit_rate']:.1%}",
            f"{run['ttft_p50'] * 1e3:.0f}",
            f"{run['ttft_p99'] * 1e3:.0f}",
            f"{run['shares'][0]:.1%}",
            str(run["errors"] or ""),
        )
    console.print(table)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, prog="shared_prefix")
    add = parser.add_argument
    add("--requests", type=int, default=400)
    add("--slow", type=float, default=4.0, help="factor on the times of the slow worker")
    add("--policy", action="append", choices=POLICIES, help="instead of all; ours always runs")
    add_cluster_options(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and report; 0 when every gate holds."""
    options = parse(arguments)
    console = Console(stderr=True)
    entries = make_entries(options.requests, options.seed)
    chosen = [each for each in options.policy or POLICIES if each != OURS]
    runs: dict[str, Run] = {}
    for name, slow in [*((each, 1.0) for each in (*chosen, OURS)), (SLOWED, options.slow)]:
        policy = OURS if name == SLOWED else name
        runs[name] = uvloop.run(measure(policy, entries, slow, options.logs))
        console.print(f"{name}: {runs[name]}")
    show(runs, console)
    missed = failures(runs, options.slow)
    for each in missed:
        console.print(f"[red]{each}")
    if options.out:
        found = {"config": vars(options), "environment": environment(), "runs": runs}
        write_json(options.out, {**found, "missed": missed})
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
