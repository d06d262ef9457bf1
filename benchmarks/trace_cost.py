"""Measures what tracing every request costs: CPU of a whole mesh with spans and without, in one
run.

`python -m benchmarks.trace_cost` starts `tokenmesh up` again and again, alternating, sends the same
requests to each, and compares the CPU time of all processes. Arguments after `--` go to `up`.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

from benchmarks.serve.memory import MemoryWatch, Trail, mesh_processes
from benchmarks.serve.own_mesh import own_mesh
from benchmarks.serve.results import environment, write_json
from tokenmesh.cli.bench.client import Target
from tokenmesh.cli.bench.load import Load
from tokenmesh.cli.bench.report import summarize
from tokenmesh.cli.bench.workload import RandomPrompts, RequestShape, first_model

_SETTLE_S = 1.0
_TIMEOUT_S = 120.0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, prog="trace_cost")
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="of each kind")
    add("--num-requests", type=int, default=400)
    add("--concurrency", type=int, default=16)
    add("--input-len", type=int, default=64)
    add("--output-len", type=int, default=64)
    add("--out", type=Path, help="write the numbers as JSON")
    add("up", nargs="*", help="arguments of `tokenmesh up`")
    return parser.parse_args(arguments)


async def measure(options: argparse.Namespace, is_traced: bool, folder: Path) -> dict[str, float]:
    """CPU seconds by process, and tokens per second, of one fresh mesh."""
    chosen = {"TOKENMESH_TELEMETRY__ENABLED": str(is_traced).lower()}
    async with own_mesh(options.up, chosen, folder / "mesh.log") as url:
        server = Target(url, None)
        shape = RequestShape(await first_model(server), "completions", 0.0, True)
        count = options.num_requests + options.concurrency
        prompts = RandomPrompts(options.input_len, options.output_len)
        asks = await prompts.asks(server, shape, count, Random(0))
        load = Load(server, shape, options.concurrency, _TIMEOUT_S, lambda _: None)
        await load.closed(asks[: options.concurrency])
        await asyncio.sleep(_SETTLE_S)
        watch = MemoryWatch(mesh_processes(server.port))
        watch.sample()
        summary = summarize(await load.closed(asks[options.concurrency :]))
        # The last spans are still on their way.
        await asyncio.sleep(_SETTLE_S)
        watch.sample()
        load.close()
    if summary["errors"]:
        raise RuntimeError(f"requests failed: {summary['errors']}")
    used = used_s(watch.trails)
    return {**used, "all": sum(used.values()), "tokens_per_s": summary["output_tokens_per_s"]}


def used_s(trails: Sequence[Trail]) -> dict[str, float]:
    """CPU seconds by name; replicas have the same."""
    used: dict[str, float] = {}
    for trail in trails:
        used[trail.name] = used.get(trail.name, 0.0) + trail.cpu_s[-1] - trail.cpu_s[0]
    return used


async def compare(options: argparse.Namespace) -> dict[str, object]:
    """Alternate, print each round, and give the ratios of the sums."""
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for is_traced in (False, True):
                numbers = await measure(options, is_traced, Path(folder))
                found[is_traced].append(numbers)
                print("traced  " if is_traced else "untraced", _line(numbers), flush=True)
    ratios = {name: _ratio(found, name) for name in found[True][0]}
    print("ratio   ", _line(ratios))
    return {"traced": found[True], "untraced": found[False], "ratio": ratios}


def _ratio(found: Mapping[bool, Sequence[Mapping[str, float]]], name: str) -> float:
    """Return the ratio of the sums: a clock has steps of 10 ms, and single rounds are disturbed."""
    traced, untraced = (sum(each.get(name, 0.0) for each in found[kind]) for kind in (True, False))
    return traced / untraced if untraced else 1.0


def _line(numbers: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {number:.3f}" for name, number in numbers.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and save."""
    options = parse(arguments)
    found = asyncio.run(compare(options))
    if options.out:
        saved = {"config": vars(options), "environment": environment(), **found}
        write_json(options.out, saved)
    return 0


if __name__ == "__main__":
    sys.exit(main())
