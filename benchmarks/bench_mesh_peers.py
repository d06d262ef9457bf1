"""The price of a request: CPU of all processes of this mesh compared with NVIDIA Dynamo's.

    python -m benchmarks.bench_mesh_peers --dynamo-python ~/dynamo/bin/python --out mesh_peers.json

Both serve with an engine that answers at once (`--engine sim`, Dynamo's mocker), so that what is
left is HTTP, tokenizing, routing, streaming and tracing. They take turns under the same client.
CPU a request is the steady figure; requests a second depend on the machine.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Final

import psutil

from benchmarks.options import add_out
from benchmarks.peers.dynamo import DYNAMO, open_dynamo
from benchmarks.peers.tiny_model import write_tiny_model
from benchmarks.serve.own_mesh import own_mesh
from benchmarks.serve.results import environment, write_json
from tokenmesh.cli.bench.client import Target
from tokenmesh.cli.bench.load import Load, Outcome
from tokenmesh.cli.bench.report import summarize
from tokenmesh.cli.bench.workload import WORDS, Ask, RequestShape

MODEL: Final = "bench"
LOADS: Final = {
    "c1 128/32": (1, 128, 32),
    "c32 128/64": (32, 128, 64),
    "c16 2048/16": (16, 2048, 16),
}
"""Concurrency, words of the prompt, output tokens."""
_TIMEOUT_S: Final = 120.0
Numbers = dict[str, float]
"""The numbers of one load on one system: CPU and TTFT in milliseconds, requests a second, chunks a
response."""
_SETTLE_S: Final = 1.0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="bench_mesh_peers", formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--dynamo-python", type=Path, help="interpreter of a venv with ai-dynamo")
    add("--preload", type=Path, help="a library for Dynamo's frontend: see benchmarks/README.md")
    add("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    add("--num-requests", type=int, default=1000, help="of each load; a tenth for one stream")
    add("--rounds", type=int, default=1, help="in which the systems take turns")
    add_out(parser)
    return parser.parse_args(arguments)


def tree_cpu_s(pids: Sequence[int]) -> dict[int, float]:
    """CPU seconds of processes and all their descendants, by pid."""
    roots = [psutil.Process(pid) for pid in pids]
    processes = [each for root in roots for each in (root, *root.children(recursive=True))]
    return {each.pid: sum(each.cpu_times()[:2]) for each in processes}


async def measure(url: str, pids: Sequence[int], load: str, count: int) -> Numbers:
    """One load on a server whose processes descend from `pids`. Raises RuntimeError."""
    concurrency, num_words, num_tokens = LOADS[load]
    random = Random(load)
    asks = [Ask(" ".join(random.choices(WORDS, k=num_words)), num_tokens) for _ in range(count)]
    sender = Load(
        Target(url, None),
        RequestShape(MODEL, "chat", 0.0, True),
        concurrency,
        _TIMEOUT_S,
        lambda _: None,
    )
    await sender.closed(asks[: 2 * concurrency])
    await asyncio.sleep(_SETTLE_S)
    before = tree_cpu_s(pids)
    outcomes = await sender.closed(asks)
    # The last spans are still on their way.
    await asyncio.sleep(_SETTLE_S)
    after = tree_cpu_s(pids)
    sender.close()
    used_s = sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())
    return _numbers(outcomes, used_s)


def _numbers(outcomes: Sequence[Outcome], used_s: float) -> Numbers:
    summary = summarize(outcomes)
    if summary["errors"]:
        raise RuntimeError(f"requests failed: {summary['errors']}")
    return {
        "cpu_ms": round(1e3 * used_s / len(outcomes), 3),
        "requests_per_s": summary["requests_per_s"],
        "ttft_p50_ms": summary["ttft_ms"]["percentiles"]["p50"],
        "chunks": sum(len(each.token_times) for each in outcomes) / len(outcomes),
    }


@asynccontextmanager
async def open_mesh(
    checkpoint: Path, folder: Path, *, is_traced: bool
) -> AsyncIterator[tuple[str, list[int]]]:
    """URL and pids of `tokenmesh up`."""
    arguments = [str(checkpoint), "--served-model-name", MODEL, "--engine", "sim"]
    chosen = {
        "TOKENMESH_WORKER__SIM_TIME_SCALE": "0",
        "TOKENMESH_TELEMETRY__ENABLED": str(is_traced).lower(),
    }
    async with own_mesh(arguments, chosen, folder / "mesh.log") as url:
        own = psutil.Process(os.getpid()).children()
        yield url, [each.pid for each in own if "up" in each.cmdline()]


Opening = Callable[[], AbstractAsyncContextManager[tuple[str, list[int]]]]


def _systems(options: argparse.Namespace, folder: Path) -> dict[str, Opening]:
    checkpoint = write_tiny_model(folder / "model")
    systems: dict[str, Opening] = {
        "tokenmesh": partial(open_mesh, checkpoint, folder, is_traced=True),
        "tokenmesh untraced": partial(open_mesh, checkpoint, folder, is_traced=False),
    }
    if options.dynamo_python is None:
        print(f"{DYNAMO} is not installed here (--dynamo-python): no peer is measured")
    else:
        systems[DYNAMO] = partial(
            open_dynamo, options.dynamo_python, checkpoint, MODEL, options.preload, folder
        )
    return systems


async def compare(options: argparse.Namespace) -> dict[str, dict[str, Numbers]]:
    """Means over the rounds, by load and system."""
    found: dict[str, dict[str, list[Numbers]]] = {load: {} for load in options.loads}
    with tempfile.TemporaryDirectory() as name:
        systems = _systems(options, Path(name))
        for system, opening in [*systems.items()] * options.rounds:
            async with opening() as (url, pids):
                for load in options.loads:
                    count = options.num_requests // (10 if LOADS[load][0] == 1 else 1)
                    numbers = await measure(url, pids, load, max(1, count))
                    found[load].setdefault(system, []).append(numbers)
                    print(f"{system:<20}{load:<14}{_line(numbers)}", flush=True)
    return {
        load: {system: _mean(rounds) for system, rounds in by_system.items()}
        for load, by_system in found.items()
    }


def _mean(rounds: Sequence[Numbers]) -> Numbers:
    return {name: round(fmean(each[name] for each in rounds), 3) for name in rounds[0]}


def _line(numbers: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.2f}" for name, value in numbers.items())


def version_of(python: Path | None) -> str | None:
    """Return the version of the peer; None where it is absent."""
    if python is None:
        return None
    code = "import importlib.metadata as m; print(m.version('ai-dynamo'))"
    return subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and save."""
    options = parse(arguments)
    start = environment()
    loads = asyncio.run(compare(options))
    if options.out:
        config = {
            "num_requests": options.num_requests,
            "rounds": options.rounds,
            "has_preload": options.preload is not None,
        }
        version = version_of(options.dynamo_python)
        saved = {"config": config, "environment": start, "dynamo": version, "loads": loads}
        write_json(options.out, saved)
    return 0


if __name__ == "__main__":
    sys.exit(main())
