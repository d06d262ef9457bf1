"""A large batch through /v1/batches, on a mesh of its own with the `sim` engine.

`python -m benchmarks.bench_batches --lines 10000`. Each line is a completion of a few tokens.
Prints lines a second, the memory of every process, and how late /livez answers meanwhile.
`--kill` kills the gateway with SIGKILL in the middle and starts it again. Exits with 1 where a line
has no answer or two.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.chaos_run.cluster import Cluster
from benchmarks.fuzz_run.lag import count_held
from benchmarks.options import add_cluster_options
from benchmarks.serve.memory import MemoryWatch, Trail
from benchmarks.serve.results import environment, write_json
from tokenmesh.cli.embedded.private import private_folder
from tokenmesh.shared.config.loader import load_settings

_POLL_S = 0.5
_PROBE_S = 0.05
_PATH = "/v1/completions"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, prog="bench_batches")
    add = parser.add_argument
    add("--lines", type=int, default=10_000)
    add("--tokens", type=int, default=4, help="output tokens of each")
    add("--concurrency", type=int, default=16, help="batches.max_requests_running")
    add("--kill", action="store_true", help="kill the gateway when half of the lines are done")
    add_cluster_options(parser)
    return parser.parse_args(arguments)


@dataclass(slots=True)
class Outcome:
    """The measurements of a run."""

    seconds: float = 0.0
    batch: dict[str, object] = field(default_factory=dict)
    answers: Counter[str] = field(default_factory=Counter)
    """Lines of the output by their custom_id."""
    late_ms: list[float] = field(default_factory=list)
    """Milliseconds that /livez took, in order."""
    trails: Sequence[Trail] = ()
    held: int | None = None
    """The number of times that the gateway's event loop was held for over 100 ms, as it measures
    itself."""


def input_file(model: str, options: argparse.Namespace) -> bytes:
    """The lines of the batch."""
    lines = []
    for number in range(options.lines):
        body = {"model": model, "prompt": f"Line {number} of rivers", "max_tokens": options.tokens}
        line = {"custom_id": f"line-{number}", "method": "POST", "url": _PATH, "body": body}
        lines.append(json.dumps(line))
    return "\n".join(lines).encode()


async def run(options: argparse.Namespace, console: Console) -> Outcome:
    """Start a mesh, run one batch, end. Raises RuntimeError when a process does not come."""
    with private_folder() as folder:
        logs = options.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        batches = {"max_requests_running": options.concurrency, "look_interval_s": 0.1}
        constants = {"batches": batches}
        settings = load_settings(None, {"worker": {"engine": "sim"}, "constants": constants})
        cluster = Cluster(settings, folder, logs, 1)
        try:
            await cluster.start()
            async with httpx.AsyncClient(base_url=cluster.urls[0], timeout=60) as client:
                return await measure(cluster, client, options, console)
        finally:
            await cluster.stop()


async def measure(
    cluster: Cluster, client: httpx.AsyncClient, options: argparse.Namespace, console: Console
) -> Outcome:
    outcome = Outcome()
    model = (await client.get("/v1/models")).json()["data"][0]["id"]
    watch = MemoryWatch([psutil.Process(each.groups[-1]) for each in cluster.children])
    watch.sample()
    began_s = time.perf_counter()
    upload = {"file": ("lines.jsonl", input_file(model, options))}
    made = await client.post("/v1/files", files=upload, data={"purpose": "batch"})
    request = {"input_file_id": made.json()["id"], "endpoint": _PATH, "completion_window": "24h"}
    batch_id = (await client.post("/v1/batches", json=request)).json()["id"]
    probe = asyncio.ensure_future(probe_livez(client, outcome.late_ms))
    has_killed = not options.kill
    while outcome.batch.get("status") not in ("completed", "failed", "expired", "cancelled"):
        await asyncio.sleep(_POLL_S)
        outcome.batch = (await client.get(f"/v1/batches/{batch_id}")).json()
        done = outcome.batch["request_counts"]["completed"]  # type: ignore[index]
        console.print(f"{time.perf_counter() - began_s:.0f} s: {done} lines", end="\r")
        if not has_killed and done >= options.lines // 2:
            has_killed = True
            watch = await kill_gateway(cluster)
        watch.sample()
    outcome.seconds = time.perf_counter() - began_s
    probe.cancel()
    outcome.trails = watch.trails
    outcome.held = count_held((await client.get("/metrics")).content)
    output = await client.get(f"/v1/files/{outcome.batch['output_file_id']}/content")
    outcome.answers = Counter(json.loads(each)["custom_id"] for each in output.text.splitlines())
    return outcome


async def kill_gateway(cluster: Cluster) -> MemoryWatch:
    """Kill it, start it again, and watch the processes that run now."""
    (gateway,) = cluster.of("gateway")
    gateway.send(signal.SIGKILL)
    await gateway.wait_end(10.0)
    await gateway.start()
    await gateway.wait_ready()
    return MemoryWatch([psutil.Process(each.groups[-1]) for each in cluster.children])


async def probe_livez(client: httpx.AsyncClient, late_ms: list[float]) -> None:
    """Measure until cancelled; while the gateway is away nothing is measured."""
    while True:
        began_s = time.perf_counter()
        try:
            await client.get("/livez")
        except httpx.TransportError:
            await asyncio.sleep(_POLL_S)
            continue
        late_ms.append(1000 * (time.perf_counter() - began_s))
        await asyncio.sleep(_PROBE_S)


def report(options: argparse.Namespace, outcome: Outcome) -> dict[str, object]:
    """The numbers as JSON."""
    late = sorted(outcome.late_ms) or [0.0]
    return {
        "config": vars(options),
        "environment": environment(),
        "status": outcome.batch["status"],
        "seconds": round(outcome.seconds, 1),
        "lines_per_s": round(options.lines / outcome.seconds, 1),
        "answered_once": sum(count == 1 for count in outcome.answers.values()),
        "answered_twice": sum(count > 1 for count in outcome.answers.values()),
        "held_over_100_ms": outcome.held,
        "livez_ms": {
            "p50": round(late[len(late) // 2], 1),
            "p99": round(late[len(late) * 99 // 100], 1),
            "longest": round(late[-1], 1),
        },
        "processes": [
            {
                "name": trail.name,
                "before_mib": round(trail.rss_mib[0], 1),
                "most_mib": round(max(trail.rss_mib), 1),
                "last_mib": round(trail.rss_mib[-1], 1),
                "cpu_s": round(trail.cpu_s[-1] - trail.cpu_s[0], 1),
            }
            for trail in outcome.trails
        ],
    }


def show(found: dict[str, object], console: Console) -> None:
    """Print the numbers."""
    for name, value in found.items():
        if name not in ("config", "environment", "processes"):
            console.print(f"{name}: {value}")
    table = Table("process", "before MiB", "most MiB", "last MiB", "CPU s")
    for each in found["processes"]:  # type: ignore[attr-defined]
        table.add_row(*(str(value) for value in each.values()))
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, report; 0 when every line has one answer."""
    options = parse(arguments)
    console = Console(stderr=True)
    found = report(options, uvloop.run(run(options, console)))
    show(found, console)
    if options.out:
        write_json(options.out, found)
    return 0 if (found["answered_once"], found["answered_twice"]) == (options.lines, 0) else 1


if __name__ == "__main__":
    sys.exit(main())
