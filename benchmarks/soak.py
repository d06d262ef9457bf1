"""Many streams for a long time against a running mesh with the `sim` engine.

`tokenmesh up tokenmesh-demo --engine sim` in one terminal, `python -m benchmarks.soak` in another.
Checks that no request fails, that each stream has each of its tokens once and in order, and that no
process of the mesh grows after the warm-up. Ends with 1 when one of these does not hold.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import psutil
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.options import add_server_options
from benchmarks.serve.memory import MemoryWatch, Trail, mesh_processes
from benchmarks.serve.results import environment, write_json
from benchmarks.serve.sim_oracle import SimOracle
from tokenmesh.cli.bench.client import Connection, StreamChunk, Target
from tokenmesh.cli.bench.load import fault
from tokenmesh.cli.bench.workload import first_model


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, prog="soak")
    add = parser.add_argument
    add("--streams", type=int, default=256, help="streams at a time")
    add("--seconds", type=float, default=120.0)
    add("--warmup", type=float, default=60.0, help="seconds before memory counts")
    add("--input-len", type=int, default=64, help="prompt tokens")
    add("--output-len", type=int, default=256)
    add("--max-growth-mib", type=float, default=8.0, help="of any process after the warm-up")
    add("--timeout", type=float, default=120.0, help="seconds for one request")
    add_server_options(parser)
    return parser.parse_args(arguments)


class Soak:
    """The streams, and what went wrong with them."""

    def __init__(self, options: argparse.Namespace, server: Target, oracle: SimOracle) -> None:
        self._options = options
        self._server = server
        self._oracle = oracle
        self._random = Random(options.seed)
        self.faults: Counter[str] = Counter()
        self.num_streams = 0
        self.num_tokens = 0

    async def run(self, until_s: float) -> None:
        """Keep all streams busy until that moment (`time.perf_counter`) and end the last ones."""
        await self._run(lambda _count: time.perf_counter() < until_s)

    async def run_each(self, num_requests: int) -> None:
        """Send that many requests a stream."""
        await self._run(lambda count: count < num_requests)

    async def _run(self, is_wanted: Callable[[int], bool]) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._options.streams):
                group.create_task(self._repeat(is_wanted))

    async def _repeat(self, is_wanted: Callable[[int], bool]) -> None:
        connection = None
        count = 0
        while is_wanted(count):
            count += 1
            try:
                async with asyncio.timeout(self._options.timeout):
                    if connection is None or not connection.is_open:
                        connection = await self._server.connect()
                    found = await self._stream(connection)
            except (TimeoutError, OSError) as error:
                found = type(error).__name__
                connection = None
            self.num_streams += 1
            if found is not None:
                self.faults[found] += 1
        if connection is not None:
            connection.close()

    async def _stream(self, connection: Connection) -> str | None:
        options = self._options
        ids = self._random.choices([*self._oracle.text_by_id], k=options.input_len)
        seed = self._random.getrandbits(31)
        received: list[str] = []

        def receive(chunk: StreamChunk) -> None:
            received.extend(choice.text for choice in chunk.choices if choice.text)

        body = {
            "model": options.model,
            "max_tokens": options.output_len,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._oracle.body(ids, seed),
        }
        request = self._server.request("POST", "/v1/completions", body)
        reply = await connection.send(request, receive)
        self.num_tokens += reply.usage.completion_tokens if reply.usage else 0
        wrong = fault(reply, options.output_len)
        if wrong is None and "".join(received) != self._oracle.text(ids, seed, options.output_len):
            return "wrong_tokens"
        return wrong


async def count_down(console: Console, soak: Soak, seconds: float) -> None:
    """A bar that ends after `seconds`."""
    columns = (BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[state]}"))
    began_s = time.perf_counter()
    with Progress(*columns, console=console, refresh_per_second=1) as progress:
        bar = progress.add_task("soak", total=seconds, state="")
        while (elapsed_s := time.perf_counter() - began_s) < seconds:
            state = f"{soak.num_streams} streams, {soak.num_tokens} tokens, "
            progress.update(bar, completed=elapsed_s, state=f"{state}{soak.faults.total()} faults")
            await asyncio.sleep(0.5)


async def run(options: argparse.Namespace, console: Console) -> tuple[Soak, list[Trail]]:
    """Warm up and soak in one go, so that memory is watched under an even load."""
    server = Target(options.base_url, options.api_key)
    options.model = options.model or await first_model(server)
    processes = mesh_processes(server.port)
    soak = Soak(options, server, await SimOracle.learn(server, options.model))
    seconds = options.warmup + options.seconds
    watch = MemoryWatch(processes)
    work = asyncio.gather(
        soak.run(time.perf_counter() + seconds),
        count_down(console, soak, seconds),
        watch.run(options.warmup, seconds),
    )
    try:
        await work
    finally:
        work.cancel()
    return soak, watch.trails


def show(soak: Soak, trails: Sequence[Trail], console: Console) -> None:
    """Print what happened and how each process fared."""
    console.print(f"{soak.num_streams} streams, {soak.num_tokens} tokens")
    for kind, count in sorted(soak.faults.items()):
        console.print(f"[red]{kind}: {count}")
    table = Table("process", "pid", "RSS MiB", "growth MiB", "slope KiB/s", "cores")
    for trail in trails:
        numbers = (trail.rss_mib[-1], trail.growth_mib(), trail.slope_kib_s(), trail.cpu_share())
        table.add_row(trail.name, str(trail.pid), *(f"{number:.2f}" for number in numbers))
    console.print(table)


def save(options: argparse.Namespace, soak: Soak, trails: Sequence[Trail]) -> None:
    """Write the numbers, what was asked for, and where it ran; without the key."""
    processes = [
        {
            "name": trail.name,
            "rss_mib": round(trail.rss_mib[-1], 2),
            "growth_mib": round(trail.growth_mib(), 3),
            "slope_kib_s": round(trail.slope_kib_s(), 3),
            "cores": round(trail.cpu_share(), 3),
        }
        for trail in trails
    ]
    found = {
        "config": {key: value for key, value in vars(options).items() if key != "api_key"},
        "environment": environment(),
        "streams": soak.num_streams,
        "tokens": soak.num_tokens,
        "faults": dict(soak.faults),
        "processes": processes,
    }
    write_json(options.out, found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak, report; 0 when everything held."""
    options = parse(arguments)
    console = Console(stderr=True)
    try:
        soak, trails = uvloop.run(run(options, console))
    except (OSError, ValueError, psutil.Error) as error:
        console.print(f"[red]{error}")
        return 2
    show(soak, trails, console)
    if options.out:
        save(options, soak, trails)
    has_grown = any(trail.growth_mib() > options.max_growth_mib for trail in trails)
    return 1 if soak.faults or has_grown else 0


if __name__ == "__main__":
    sys.exit(main())
