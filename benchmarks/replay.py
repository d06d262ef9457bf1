"""Replays a trace of requests against a mesh of its own with `sim` workers, and compares policies.

The trace is a file in Mooncake's format (see replay_run/trace.py), or made up (`--synthetic N`).
Time runs `--speed` times as fast; every time shown is in the trace's seconds. All services are
real: HTTP, tokenizer, scheduler with the index in Redis, workers with real KV blocks; only the
model's time is simulated. What the services themselves take is `--speed` times as much in the
trace's time, so a high speed shows an upper bound: look at `late`, the delay of the sender alone.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.chaos_run.cluster import Cluster
from benchmarks.options import add_cluster_options
from benchmarks.replay_run.faults import carry_out, parse_fault, parse_slow
from benchmarks.replay_run.player import PlayedRequest, Player
from benchmarks.replay_run.prompts import Prompts
from benchmarks.replay_run.score import Score, score
from benchmarks.replay_run.trace import BLOCK_TOKENS, Entry, make_trace, most_cached, read_trace
from benchmarks.serve.results import environment, write_json
from tokenmesh.cli.bench.client import Target
from tokenmesh.cli.bench.workload import first_model
from tokenmesh.cli.embedded.private import private_folder
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.loader import DEMO_MODEL, load_settings

BEAT_S = 0.2
INDEX_WRITE_S = 0.03
"""Seconds of the clock, not of the trace: beats and writes are work, whatever the speed."""
POLICIES = ("estimated_ttft", "least_tokens", "prefix_hash", "round_robin")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, prog="replay")
    add = parser.add_argument
    add("trace", type=Path, nargs="?", help="JSON lines; or --synthetic")
    add("--synthetic", type=int, default=200, help="requests to make up without a trace")
    add("--limit", type=int, help="only the first requests")
    add("--until", type=float, help="only those of the first seconds")
    add("--rate", type=float, default=1.0, help="factor on the arrival rate")
    add("--speed", type=float, default=10.0, help="factor on all time")
    add("--policy", action="append", choices=POLICIES, help="several: one after the other")
    add("--workers", type=int, default=8)
    add("--gateways", type=int, default=1)
    add("--prefill-rate", type=float, default=8000.0, help="tokens a second of one worker")
    add("--cache-blocks", type=int, default=1500, help="blocks of 512 tokens a worker holds")
    add("--max-output", type=int, help="cut outputs to so many tokens; 1: prefill only")
    add("--bound", type=float, default=5.0, help="seconds to the first token that are good")
    add("--timeout", type=float, default=600.0, help="seconds for one request")
    add("--slow", type=parse_slow, action="append", default=[], help="WORKER:FACTOR on its times")
    add("--fault", type=parse_fault, action="append", default=[], help=parse_fault.__doc__)
    add_cluster_options(parser)
    return parser.parse_args(arguments)


def entries_of(options: argparse.Namespace) -> list[Entry]:
    """Make or read the entries to replay. Raises ValueError and OSError."""
    if options.trace is None:
        entries = make_trace(options.synthetic, rate=4.0, seed=options.seed)
    else:
        entries = read_trace(options.trace, options.limit, options.until)
    return [
        Entry(
            entry.timestamp / options.rate,
            entry.input_length,
            min(entry.output_length, options.max_output or entry.output_length),
            entry.hash_ids,
        )
        for entry in entries
    ]


def settings_of(options: argparse.Namespace, policy: str) -> Settings:
    """The bundled model, simulated; whatever is seconds of a request shrinks with the speed."""
    block_size, speed = 64, options.speed
    pool_tokens = options.cache_blocks * BLOCK_TOKENS
    worker = {
        "engine": "sim",
        "block_size": block_size,
        "num_gpu_blocks_override": pool_tokens // block_size + 1,
        "sim_prefill_tokens_per_s": options.prefill_rate,
        "sim_time_scale": 1 / speed,
        "max_waiting": 100_000,
        "max_waiting_tokens": 1_000_000_000,
    }
    scheduler = {
        "assumed_prefill_tokens_per_s": options.prefill_rate * speed,
        "kv_pressure_s": 0.15 / speed,
        "tie_s": 0.005 / speed,
    }
    return load_settings(
        None,
        {
            "model": {"max_model_len": pool_tokens},
            "worker": worker,
            "scheduler": {"policy": policy, "max_queued": 100_000},
            "telemetry": {"sample_ratio": 0.0},
            "service": {"drain_grace_s": 1.0},
            "constants": {
                "scheduler": scheduler,
                "prefix_index": {"write_interval_s": INDEX_WRITE_S},
                "service": {"worker_beat_interval_s": BEAT_S, "missed_beats": 10},
            },
            "up": {"workers": options.workers},
        },
    )


async def replay(
    options: argparse.Namespace, entries: list[Entry], policy: str
) -> list[PlayedRequest]:
    """One run on a mesh of its own. Raises RuntimeError when a process does not come (back)."""
    slow = {
        f"worker {number}": {"TOKENMESH_WORKER__SIM_TIME_SCALE": str(factor / options.speed)}
        for number, factor in options.slow
    }
    with private_folder() as folder:
        logs = options.logs / policy if options.logs else folder
        logs.mkdir(parents=True, exist_ok=True)
        cluster = Cluster(settings_of(options, policy), folder, logs, options.gateways, slow)
        try:
            await cluster.start()
            return await _play(options, entries, cluster)
        finally:
            await cluster.stop()


async def _play(
    options: argparse.Namespace, entries: list[Entry], cluster: Cluster
) -> list[PlayedRequest]:
    servers = [Target(url, None) for url in cluster.urls]
    prompts = Prompts(json.loads((DEMO_MODEL / "config.json").read_bytes())["vocab_size"])
    model = await first_model(servers[0])
    speed, timeout_s = options.speed, options.timeout
    player = Player(servers, model, prompts, speed=speed, timeout_s=timeout_s)
    async with asyncio.TaskGroup() as group:
        faults = [
            group.create_task(carry_out(each, cluster.of("worker"), options.speed))
            for each in options.fault
        ]
        played = await player.play(entries)
        for fault in faults:
            fault.cancel()
    return played


def show(scores: dict[str, Score], options: argparse.Namespace, console: Console) -> None:
    """A row a policy."""
    table = Table(
        "policy", "hit", "p50 s", "p90 s", "p99 s", f"< {options.bound:g} s", "late s", "errors"
    )
    for policy, found in scores.items():
        table.add_row(
            policy,
            f"{found['hit_rate']:.1%}",
            f"{found['ttft_p50']:.2f}",
            f"{found['ttft_p90']:.2f}",
            f"{found['ttft_p99']:.2f}",
            f"{found['under_bound']:.1%}",
            f"{found['late_max']:.2f}",
            str(found["errors"] or ""),
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and report; 0 when no request failed."""
    options = parse(arguments)
    console = Console(stderr=True)
    entries = entries_of(options)
    console.print(f"{len(entries)} requests, at most {most_cached(entries):.1%} can be cached")
    scores: dict[str, Score] = {}
    for policy in options.policy or POLICIES[:1]:
        played = uvloop.run(replay(options, entries, policy))
        scores[policy] = score(played, options.bound)
        console.print(f"{policy}: {scores[policy]}")
    show(scores, options, console)
    if options.out:
        found = {"config": vars(options), "environment": environment(), "policies": scores}
        write_json(options.out, found)
    return int(any(found["errors"] for found in scores.values()))


if __name__ == "__main__":
    sys.exit(main())
