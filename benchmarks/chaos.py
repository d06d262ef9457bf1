"""A mesh under random faults, with every stream checked token for token.

Starts NATS, Redis, gateways, tokenizers, schedulers and workers as processes, keeps streams
running, and meanwhile kills, freezes and terminates processes and restarts the servers: what, when
and which process follows from `--seed`. Gateways die too: those that serve stored responses, and
with `--prefill-workers` chats, whose clients send the request again.

At the end no stream may have failed or have a wrong, lost or doubled token, nothing may be held
(blocks, streams, reservations, marks, subscriptions) and no process or file be left, and each
tenant must have been charged the usage that its clients received, to the token. With `--engine
torch` the p99 gap of streams with a grammar may be at most 1.5 times that of plain ones. Ends with
1 otherwise.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.chaos_run import completions
from benchmarks.chaos_run.accounts import RECORDER, ROAMER, Audit, audit, servers_of, write_key_file
from benchmarks.chaos_run.bodies import chats, responses
from benchmarks.chaos_run.cluster import Cluster
from benchmarks.chaos_run.completions import Completions
from benchmarks.chaos_run.faults import Chaos, draw
from benchmarks.chaos_run.gaps import MAX_GUIDED_RATIO, by_fault, by_kind, guided_ratio, spread
from benchmarks.chaos_run.leaks import leftover_files, watching
from benchmarks.chaos_run.longest import longest_silences, write_traces
from benchmarks.chaos_run.received import RequestKind
from benchmarks.chaos_run.recorded import Chats
from benchmarks.chaos_run.responses import StoredResponses
from benchmarks.chaos_run.streams import Streams
from benchmarks.options import add_cluster_options
from benchmarks.serve.results import environment, write_json
from benchmarks.serve.sim_oracle import SimOracle
from tokenmesh.cli.bench.client import Target
from tokenmesh.cli.bench.workload import first_model
from tokenmesh.cli.embedded.private import private_folder
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.loader import load_settings

_SHOWN_EVERY_S = 5.0
_STALLED_S = 3.0
_FAILURES_SHOWN = 20


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, prog="chaos")
    add = parser.add_argument
    add("--faults", type=int, default=500)
    add("--streams", type=int, default=5000, help="streams at least (choices of requests)")
    add("--seconds", type=float, default=3600.0, help="stop after so long, whatever is left")
    add("--interval", type=float, default=1.0, help="mean seconds between two faults")
    add("--concurrency", type=int, default=12, help="requests at a time")
    add("--step", type=float, default=0.02, help="seconds of a worker's step")
    add("--workers", type=int, default=3)
    add("--prefill-workers", type=int, default=0, help="the workers then decode; prompts are long")
    add("--tokenizers", type=int, default=2)
    add("--schedulers", type=int, default=2)
    add("--gateways", type=int, default=2)
    add("--responders", type=int, default=2, help="further gateways, which may die")
    add("--engine", choices=("sim", "torch"), default="sim")
    add("--timeout", type=float, default=120.0, help="seconds for one request")
    add(
        "--speculative-config",
        type=json.loads,
        help="JSON: workers speculate, and each chat predicts its own answer; {}: only that",
    )
    add_cluster_options(parser)
    return parser.parse_args(arguments)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A whole run."""

    streams: Streams
    chaos: Chaos
    leaks: list[str]
    accounts: Audit
    seconds: float

    @property
    def is_good(self) -> bool:
        """True where everything held."""
        is_right = not (self.streams.faults or self.leaks or self.accounts.differences)
        return is_right and (self.guided_ratio or 0.0) <= MAX_GUIDED_RATIO

    @property
    def guided_ratio(self) -> float | None:
        """See `gaps.guided_ratio`."""
        return guided_ratio(by_kind(self.streams.received))


def settings_of(options: argparse.Namespace, keys_file: Path) -> Settings:
    """The bundled model; graces short enough that a hand-over really happens."""
    engine = {"engine": options.engine, "sim_step_s": options.step}
    if options.engine == "torch":
        engine |= {"batch_invariant": True}
    if options.prefill_workers:
        engine |= {"kv_offloading_size": 0.25}
    return load_settings(
        None,
        {
            "worker": engine,
            "model": {"speculative_config": options.speculative_config or {}},
            "service": {"drain_grace_s": 2.0},
            "gateway": {"seed": completions.SEED, "keys_file": str(keys_file)},
            "constants": {
                "worker": {"hand_over_s": 1.0},
                "prefix_index": {"reservation_s": 5.0},
            },
            "up": {
                "workers": options.workers,
                "prefill_workers": options.prefill_workers,
                "tokenizers": options.tokenizers,
                "schedulers": options.schedulers,
            },
        },
    )


async def run(options: argparse.Namespace, console: Console) -> Outcome:
    """Start, disturb, check, end. Raises RuntimeError when a process does not come (back)."""
    with private_folder() as folder:
        logs = options.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        count = options.gateways
        settings, responders = settings_of(options, write_key_file(folder)), options.responders
        cluster = Cluster(
            settings, folder, logs, count, num_responders=responders, is_redis_durable=True
        )
        began_s = time.perf_counter()
        leaks: list[str] = []
        try:
            await cluster.start()
            async with watching(cluster) as leak_watch:
                recorder = Target(cluster.urls[0], RECORDER)
                model = await first_model(recorder)
                streams, chaos = await disturb(cluster, model, options, console)
                if options.logs:
                    longest = longest_silences(streams.received, chaos.faults)
                    await write_traces(cluster.urls, longest, logs)
                leaks += chaos.unclean + await leak_watch.find()
                urls = [*cluster.urls, *cluster.responder_urls]
                limits = cluster.settings.responses
                accounts = await audit(urls, model, streams.received, leak_watch.bus, limits)
        finally:
            leaks += [f"left behind: {each}" for each in await cluster.stop()]
        leaks += leftover_files(cluster)
        return Outcome(streams, chaos, leaks, accounts, time.perf_counter() - began_s)


async def disturb(
    cluster: Cluster, model: str, options: argparse.Namespace, console: Console
) -> tuple[Streams, Chaos]:
    """Streams and faults side by side until there were enough of both."""
    random = Random(options.seed)
    weights = await request_kinds(cluster, model, options, random)
    streams = Streams(weights, Random(random.getrandbits(64)), options.timeout)
    chaos = Chaos(cluster, Random(random.getrandbits(64)), options.interval)
    faults = draw(random, options.faults, moves_kv=bool(options.prefill_workers))
    until_s = time.perf_counter() + options.seconds

    def is_wanted() -> bool:
        is_early = time.perf_counter() < until_s and streams.num_choices < options.streams
        return is_early or not breaking.done()

    async with asyncio.TaskGroup() as group:
        breaking = group.create_task(chaos.run(faults, until_s))
        showing = group.create_task(show_progress(streams, chaos, console))
        await streams.run(options.concurrency, is_wanted)
        await breaking
        showing.cancel()
    return streams, chaos


async def request_kinds(
    cluster: Cluster, model: str, options: argparse.Namespace, random: Random
) -> dict[RequestKind, int]:
    """Kinds of requests, and how many of each there are among so many."""
    engine, moves_kv = options.engine, bool(options.prefill_workers)
    predicts = options.speculative_config is not None
    servers, recorder = servers_of(cluster.urls), Target(cluster.urls[0], RECORDER)
    has_grammars = engine == "torch"

    def own_random() -> Random:
        return Random(random.getrandbits(64))

    bodies = chats(model, has_grammars=has_grammars, are_long=moves_kv)
    recorded = await Chats.record(
        servers, recorder, bodies, own_random(), predicts=predicts, is_salted=moves_kv
    )
    weights: dict[RequestKind, int] = {recorded: 8 if moves_kv else 2}
    if moves_kv and cluster.responder_urls:
        roaming = servers_of(cluster.responder_urls, (ROAMER,))
        weights[recorded.asking_again(roaming, own_random())] = 8
    if engine == "sim":
        oracle = await SimOracle.learn(recorder, model)
        weights[Completions(servers, model, oracle, own_random())] = 6
    if cluster.responder_urls:
        servers = servers_of(cluster.responder_urls)
        bodies = responses(model, has_grammars=has_grammars)
        weights[await StoredResponses.record(servers, recorder, bodies, own_random())] = (
            6 if engine == "sim" else 3
        )
    return weights


async def show_progress(streams: Streams, chaos: Chaos, console: Console) -> None:
    """A line now and then; notes when the whole machine has stood still."""
    while True:
        began_s = time.perf_counter()
        await asyncio.sleep(_SHOWN_EVERY_S)
        late_s = time.perf_counter() - began_s - _SHOWN_EVERY_S
        if late_s > _STALLED_S:
            chaos.stalls.append((round(began_s, 1), round(late_s, 1)))
        console.print(
            f"{len(chaos.faults)} faults, {streams.num_choices} streams, "
            f"{streams.num_tokens} tokens, wrong: {dict(streams.faults)}"
        )


def report(options: argparse.Namespace, outcome: Outcome) -> dict[str, object]:
    """The numbers as JSON."""
    streams, faults = outcome.streams, outcome.chaos.faults
    starts = [each.first_s - each.began_s for each in streams.received if each.first_s is not None]
    return {
        "config": vars(options),
        "environment": environment(),
        "seconds": round(outcome.seconds, 1),
        "faults": len(faults),
        "requests": len(streams.received),
        "streams": streams.num_choices,
        "tokens": streams.num_tokens,
        "accepted_drafts": sum(each.num_accepted for each in streams.received),
        "stalls": outcome.chaos.stalls,
        "moves": dict(outcome.streams.moves),
        "kinds": dict(streams.kinds),
        "faults_by_kind": dict(Counter(each.label for each in faults)),
        "failures": dict(streams.faults),
        "failed": failed(outcome)[:_FAILURES_SHOWN],
        "leaks": outcome.leaks,
        "accounts": outcome.accounts.expected,
        "account_differences": outcome.accounts.differences,
        "first_token": spread(starts),
        "gaps": by_fault(streams.received, faults),
        "longest_gaps": by_kind(streams.received),
        "longest_silences": longest_silences(streams.received, faults),
        "guided_ratio": outcome.guided_ratio,
    }


def failed(outcome: Outcome) -> list[dict[str, object]]:
    """Each request that failed, and the faults of its time."""
    return [
        {
            "fault": received.fault,
            "asked": received.described,
            "choices": [[shown.expected, shown.texts] for shown in received.choices],
            "seconds": [round(received.began_s, 3), round(received.ended_s, 3)],
            "meanwhile": [
                f"{each.label} {each.began_s:.3f} to {each.healed_s:.3f}"
                for each in outcome.chaos.faults
                if each.began_s <= received.ended_s and each.healed_s >= received.began_s
            ],
        }
        for received in outcome.streams.received
        if received.fault is not None
    ]


def show(found: dict[str, object], outcome: Outcome, console: Console) -> None:
    """Print the numbers."""
    counts = ("faults", "stalls", "requests", "streams", "tokens", "accepted_drafts", "moves")
    shown = ("failures", "leaks", "accounts", "account_differences", "first_token", "guided_ratio")
    for name in (*counts, *shown):
        console.print(f"{name}: {found[name]}")
    received = outcome.streams.received
    tables = {
        "gaps over 50 ms": by_fault(received, outcome.chaos.faults),
        "longest gap of a stream": by_kind(received),
    }
    for title, rows in tables.items():
        table = Table(title, "count", "p50 ms", "p99 ms", "max ms")
        for label, each in rows.items():
            table.add_row(label, *map(str, each.values()))
        console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, report; 0 when everything held."""
    options = parse(arguments)
    console = Console(stderr=True)
    try:
        outcome = uvloop.run(run(options, console))
    except (RuntimeError, ExceptionGroup):
        console.print_exception()
        return 2
    found = report(options, outcome)
    show(found, outcome, console)
    if options.out:
        write_json(options.out, found)
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
