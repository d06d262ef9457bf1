"""Measures how long streams are silent when their worker is killed or stands still.

Starts a mesh of its own with `sim` workers. What counts is the silence less the prefill of prompt
and tokens so far, by the workers' own timing model; its p99 has a bound for each fault. Then the
only tokenizer is killed, and stands still for 10 s: what counts is the time from its return to the
first tokens of what was asked meanwhile. Ends with 1 when a bound is not held, or a stream fails.
Wants a quiet machine.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import uvloop
from rich.console import Console

from benchmarks.chaos_run.cluster import Cluster
from benchmarks.chaos_run.completions import SEED, Completions
from benchmarks.chaos_run.faults import Kind, carry_out
from benchmarks.chaos_run.gaps import Spread, spread
from benchmarks.chaos_run.received import Gap, ReceivedResponse
from benchmarks.chaos_run.streams import Streams
from benchmarks.options import add_cluster_options
from benchmarks.serve.results import environment, write_json
from benchmarks.serve.sim_oracle import SimOracle
from tokenmesh.cli.bench.client import Target
from tokenmesh.cli.bench.workload import first_model
from tokenmesh.cli.embedded.private import private_folder
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.loader import load_settings

BOUNDS_S: dict[Kind, float] = {"kill": 0.1, "freeze": 0.3}
"""The bounds of p99, plus prefill."""
BACK_S = 2.0
"""The bound of the last first token, after the return of a tokenizer."""
_AWAY_S: dict[Kind, float] = {"kill": 1.0, "freeze": 10.0}
"""The seconds that a tokenizer is away at least."""
_AFTER_S = 1.0
"""Silences that end so long after a fault count for it."""
_FROZEN_S = 1.2
_SETTLE_S = 1.0
_LONGEST_SHOWN = 10


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, prog="bench_recovery")
    add = parser.add_argument
    add("--kind", choices=tuple(BOUNDS_S), action="append", help="default: both")
    add("--faults", type=int, default=20, help="of each kind")
    add("--tokenizer-faults", type=int, default=2, help="of each kind")
    add("--concurrency", type=int, default=8, help="requests at a time")
    add("--workers", type=int, default=3)
    add("--step", type=float, default=0.01, help="seconds of a worker's step")
    add_cluster_options(parser)
    return parser.parse_args(arguments)


@dataclass(slots=True)
class Moments:
    """When a kind of fault happened."""

    kind: Kind
    began_s: list[float] = field(default_factory=list)

    def cause(self, gap: Gap) -> float | None:
        """When the fault was that a silence began or ended with."""
        return next((each for each in self.began_s if _belongs(gap, each)), None)


@dataclass(slots=True)
class Absence:
    """A time without a tokenizer."""

    kind: Kind
    began_s: float
    ended_s: float

    def lateness(self, received: Sequence[ReceivedResponse]) -> list[float]:
        """From its end to the first token of each request that was waiting then."""
        return [
            each.first_s - self.ended_s
            for each in received
            if each.first_s is not None
            and each.began_s < self.ended_s
            and each.first_s > self.began_s + _MOMENT_S
        ]


_MOMENT_S = 0.1
"""Tokens that come so soon after a fault were on their way."""


def _belongs(gap: Gap, fault_s: float) -> bool:
    return fault_s <= gap.end_s and gap.start_s <= fault_s + _AFTER_S


def settings_of(options: argparse.Namespace) -> Settings:
    """Workers with a step of the given time."""
    worker = {"engine": "sim", "sim_step_s": options.step}
    values = {"worker": worker, "up": {"workers": options.workers}, "gateway": {"seed": SEED}}
    return load_settings(None, values)


Measured = tuple[Streams, list[Moments], list[Absence]]


async def run(options: argparse.Namespace) -> Measured:
    """Streams, and faults one after the other."""
    with private_folder() as folder:
        logs = options.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        cluster = Cluster(settings_of(options), folder, logs, 1)
        try:
            await cluster.start()
            return await _disturb(cluster, options)
        finally:
            await cluster.stop()


async def _disturb(cluster: Cluster, options: argparse.Namespace) -> Measured:
    servers = [Target(url, None) for url in cluster.urls]
    model = await first_model(servers[0])
    oracle = await SimOracle.learn(servers[0], model)
    random = Random(options.seed)
    streams = Streams({Completions({"": servers}, model, oracle, random): 1}, random, 60.0)
    moments = [Moments(kind) for kind in options.kind or BOUNDS_S]
    is_over = asyncio.Event()
    running = asyncio.create_task(streams.run(options.concurrency, lambda: not is_over.is_set()))
    await asyncio.sleep(_SETTLE_S)
    for each in moments:
        for _ in range(options.faults):
            victim = random.choice(cluster.of("worker"))
            each.began_s.append(time.perf_counter())
            # A starting process takes the machine's time: not while streams recover.
            pause_s = _FROZEN_S if each.kind == "freeze" else _AFTER_S
            await carry_out(each.kind, victim, pause_s)
            await asyncio.sleep(_SETTLE_S)
    absences = [
        await _without_tokenizer(cluster, each.kind) for each in moments * options.tokenizer_faults
    ]
    is_over.set()
    await running
    return streams, moments, absences


async def _without_tokenizer(cluster: Cluster, kind: Kind) -> Absence:
    (victim,) = cluster.of("tokenizer")
    began_s = time.perf_counter()
    await carry_out(kind, victim, _AWAY_S[kind])
    absence = Absence(kind, began_s, time.perf_counter())
    await asyncio.sleep(BACK_S + _SETTLE_S)
    return absence


@dataclass(frozen=True, slots=True)
class Silence:
    """After a fault; seconds."""

    after_s: float
    """From the fault to its end."""
    excess_s: float
    """Its length less the prefill of what was generated before it."""


def silences(streams: Streams, moments: Moments, settings: Settings) -> list[Silence]:
    """The longest first."""
    found = []
    for received in streams.received:
        for gap in (gap for shown in received.choices for gap in shown.gaps):
            fault_s = moments.cause(gap)
            if fault_s is not None:
                excess_s = gap.end_s - gap.start_s - prefill_s(received, gap, settings)
                found.append(Silence(gap.end_s - fault_s, excess_s))
    return sorted(found, key=lambda each: -each.excess_s)


def prefill_s(received: ReceivedResponse, gap: Gap, settings: Settings) -> float:
    """Return the duration of the step that takes a stream over."""
    num_tokens = received.num_prompt + gap.num_chars // _TOKEN_CHARS
    return settings.worker.sim_step_s + num_tokens / settings.worker.sim_prefill_tokens_per_s


_TOKEN_CHARS = 2
"""A space and a letter."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, judge; 0 when all bounds are held."""
    options, console = parse(arguments), Console(stderr=True)
    streams, moments, absences = uvloop.run(run(options))
    settings = settings_of(options)
    received = {each.kind: silences(streams, each, settings) for each in moments}
    found: dict[Kind, Spread] = {
        kind: spread([silence.excess_s for silence in each]) for kind, each in received.items()
    }
    late = [
        kind
        for kind, each in found.items()
        if not each["count"] or each["p99_ms"] > 1000 * BOUNDS_S[kind]
    ]
    waits = {
        kind: sorted(
            each
            for gone in absences
            if gone.kind == kind
            for each in gone.lateness(streams.received)
        )
        for kind in found
    }
    late_tokenizers = [kind for kind, each in waits.items() if each and each[-1] > BACK_S]
    for kind, each in found.items():
        console.print(f"{kind}: silence less prefill {each}, bound {1000 * BOUNDS_S[kind]:g} ms")
        if waits[kind]:
            console.print(
                f"{kind} of the tokenizer: {len(waits[kind])} first tokens at most "
                f"{waits[kind][-1]:.2f} s after its return, bound {BACK_S:g} s"
            )
    console.print(
        f"failures: {dict(streams.faults)}, not held: {late}, of the tokenizer: {late_tokenizers}"
    )
    if options.out:
        result = {
            "config": vars(options),
            "environment": environment(),
            "bounds_s": BOUNDS_S,
            "silence_less_prefill": found,
            "first_tokens_after_tokenizer_s": waits,
            "longest": {kind: each[:_LONGEST_SHOWN] for kind, each in received.items()},
            "failures": dict(streams.faults),
            "requests": len(streams.received),
        }
        write_json(options.out, result)
    return 1 if late or late_tokenizers or streams.faults else 0


if __name__ == "__main__":
    sys.exit(main())
