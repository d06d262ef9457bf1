"""Hostile clients over HTTP, websocket and the bus against a mesh of its own.

Bodies come from the OpenAPI document and are mutated, up to the largest that is taken; heads,
multipart parts and frames are spoiled; bytes that are no message go to every subject. No answer may
be a 5xx or fail to come, no event loop may be held for over 100 ms as its own process measures it,
no process may grow after the warm-up or end. Ends with 1 otherwise. A machine whose cores are busy
with something else holds event loops, too.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

import msgspec
import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.chaos_run.accounts import ADMIN, RECORDER, write_key_file
from benchmarks.chaos_run.cluster import Cluster
from benchmarks.fuzz_run.bus import BusFuzzer
from benchmarks.fuzz_run.http import HttpFuzzer
from benchmarks.fuzz_run.lag import read_held
from benchmarks.fuzz_run.realtime import RealtimeFuzzer
from benchmarks.fuzz_run.schema import HIDDEN, BodyMaker, operations
from benchmarks.options import add_cluster_options
from benchmarks.serve.memory import MemoryWatch, Trail
from benchmarks.serve.results import environment, write_json
from tokenmesh.cli.bench.client import Target
from tokenmesh.cli.bench.workload import first_model
from tokenmesh.cli.embedded.ports import free_port
from tokenmesh.cli.embedded.private import private_folder
from tokenmesh.shared.bus.message_bus import MessageBus, connect
from tokenmesh.shared.bus.nats import NatsLink
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.loader import load_settings
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.subjects import slug

_SHOWN_EVERY_S = 10.0
_WRONG_SHOWN = 20


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, prog="fuzz")
    add = parser.add_argument
    add("--seconds", type=float, default=1800.0)
    add("--warmup", type=float, default=60.0, help="seconds before memory counts")
    add("--clients", type=int, default=4, help="HTTP connections at a time")
    add("--sessions", type=int, default=2, help="websockets at a time")
    add("--engine", choices=("sim", "torch"), default="torch")
    add("--max-growth-mib", type=float, default=32.0, help="of any process after the warm-up")
    add_cluster_options(parser)
    return parser.parse_args(arguments)


@dataclass(slots=True)
class Attack:
    """Who attacks."""

    http: HttpFuzzer
    realtime: RealtimeFuzzer
    bus: BusFuzzer

    @property
    def wrong(self) -> list[str]:
        """Results that must not have happened."""
        return [*self.http.wrong, *self.realtime.wrong]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A whole run."""

    attack: Attack
    trails: Sequence[Trail]
    held: dict[str, int | None]
    """The number of times that each event loop was held; None: the process does not answer, or does
    not say."""
    ended: list[str]
    """Processes that are gone."""

    def is_good(self, max_growth_mib: float) -> bool:
        """True where everything held."""
        has_grown = any(trail.growth_mib() > max_growth_mib for trail in self.trails)
        return not (
            self.attack.wrong
            or self.ended
            or has_grown
            or any(count != 0 for count in self.held.values())
        )


_KV_BLOCKS: Final = 256
_OPTIONAL_ROUTES: Final = ("admin_routes", "scale_out", "tokenizer_info")


def settings_of(options: argparse.Namespace, keys_file: Path) -> Settings:
    """The bundled model, one process of each service."""
    # a block takes memory when it is first used, which is not growth: a small pool is soon full
    worker = {"engine": options.engine, "num_gpu_blocks_override": _KV_BLOCKS}
    gateway = {"keys_file": str(keys_file), **dict.fromkeys(_OPTIONAL_ROUTES, True)}
    return load_settings(None, {"worker": worker, "gateway": gateway})


async def run(options: argparse.Namespace, console: Console) -> Outcome:
    """Start, attack, look, end. Raises RuntimeError when a process does not come."""
    with private_folder() as folder:
        logs = options.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        ports = {name: free_port() for name in ("worker", "tokenizer", "scheduler")}
        environments = {
            name: {"TOKENMESH_TELEMETRY__METRICS_PORT": str(port)} for name, port in ports.items()
        }
        settings = settings_of(options, write_key_file(folder))
        cluster = Cluster(settings, folder, logs, 1, environments)
        endpoints = {name: Target(f"http://127.0.0.1:{port}", None) for name, port in ports.items()}
        endpoints["gateway"] = Target(cluster.urls[0], ADMIN)
        try:
            await cluster.start()
            bus = await connect(cluster.settings.bus, "fuzz")
            try:
                attack = await prepare(cluster, bus, options)
                before = await read_held(endpoints)
                trails = await carry_out(attack, cluster, options, console)
                after = await read_held(endpoints)
            finally:
                await bus.close()
            held = {name: _difference(before[name], count) for name, count in after.items()}
            ended = [each.name for each in cluster.children if each.exit_code is not None]
            return Outcome(attack, trails, held, ended)
        finally:
            await cluster.stop()


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


async def prepare(cluster: Cluster, bus: MessageBus, options: argparse.Namespace) -> Attack:
    """Read the OpenAPI document and make the attackers."""
    random, server = Random(options.seed), Target(cluster.urls[0], RECORDER)
    model = await first_model(server)
    document = msgspec.json.decode(await server.fetch("GET", "/openapi.json"))
    maker = BodyMaker(document, Random(random.getrandbits(64)), {"model": model, "max_tokens": 4})
    limits = cluster.settings
    link = bus._link
    assert isinstance(link, NatsLink)
    instances = [each.instance_id for each in cluster.children if each.instance_id]

    def own_random() -> Random:
        return Random(random.getrandbits(64))

    max_body_bytes = limits.gateway.max_body_bytes
    return Attack(
        HttpFuzzer(
            server,
            Target(cluster.urls[0], ADMIN),
            [*operations(document), *HIDDEN],
            maker,
            own_random(),
            max_body_bytes,
        ),
        RealtimeFuzzer(server, RECORDER, model, own_random()),
        BusFuzzer(
            link, instances, slug(ModelName(model)), own_random(), limits.bus.max_message_bytes
        ),
    )


async def carry_out(
    attack: Attack, cluster: Cluster, options: argparse.Namespace, console: Console
) -> Sequence[Trail]:
    """Attack from all sides for the given time; memory of each process after the warm-up."""
    watch = MemoryWatch([psutil.Process(each.groups[-1]) for each in cluster.children])
    tasks = [asyncio.ensure_future(attack.bus.run())]
    tasks += [asyncio.ensure_future(attack.http.run()) for _ in range(options.clients)]
    tasks += [asyncio.ensure_future(attack.realtime.run()) for _ in range(options.sessions)]
    tasks.append(asyncio.ensure_future(show_progress(attack, console)))
    watching = asyncio.ensure_future(watch.run(options.warmup, options.seconds))
    try:
        done, _ = await asyncio.wait([watching, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    finally:
        for each in (watching, *tasks):
            each.cancel()
        await asyncio.gather(watching, *tasks, return_exceptions=True)
    return watch.trails


async def show_progress(attack: Attack, console: Console) -> None:
    """A line now and then."""
    began_s, shown = time.perf_counter(), 0
    while True:
        await asyncio.sleep(_SHOWN_EVERY_S)
        console.print(
            f"{time.perf_counter() - began_s:.0f} s: {dict(attack.http.answers)}, websockets "
            f"{dict(attack.realtime.ends)}, {attack.bus.num_sent} bus messages"
        )
        for line in attack.wrong[shown:][:_WRONG_SHOWN]:
            console.print(f"[red]{line[:300]}", markup=False)
        shown = len(attack.wrong)


def report(options: argparse.Namespace, outcome: Outcome) -> dict[str, object]:
    """The numbers as JSON."""
    attack = outcome.attack
    return {
        "config": vars(options),
        "environment": environment(),
        "http_answers": dict(attack.http.answers),
        "websocket_ends": dict(attack.realtime.ends),
        "bus_messages": attack.bus.num_sent,
        "wrong": attack.wrong[:_WRONG_SHOWN],
        "event_loop_held_over_100_ms": outcome.held,
        "ended": outcome.ended,
        "processes": [
            {
                "name": trail.name,
                "rss_mib": round(trail.rss_mib[-1], 1),
                "growth_mib": round(trail.growth_mib(), 1),
            }
            for trail in outcome.trails
        ],
    }


def show(found: dict[str, object], outcome: Outcome, console: Console) -> None:
    """Print the numbers."""
    names = ("http_answers", "websocket_ends", "bus_messages", "event_loop_held_over_100_ms")
    for name in (*names, "ended", "wrong"):
        console.print(f"{name}: {found[name]}", markup=False)
    table = Table("process", "RSS MiB", "growth MiB")
    for trail in outcome.trails:
        table.add_row(trail.name, f"{trail.rss_mib[-1]:.1f}", f"{trail.growth_mib():.1f}")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack, report; 0 when everything held."""
    options = parse(arguments)
    console = Console(stderr=True)
    try:
        outcome = uvloop.run(run(options, console))
    except (RuntimeError, psutil.Error, ExceptionGroup):
        console.print_exception()
        return 2
    found = report(options, outcome)
    show(found, outcome, console)
    if options.out:
        write_json(options.out, found)
    return 0 if outcome.is_good(options.max_growth_mib) else 1


if __name__ == "__main__":
    sys.exit(main())
