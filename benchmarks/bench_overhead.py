"""Measures what the mesh adds to its own engine: TTFT of one stream and throughput of 32, in one
run.

    python -m benchmarks.bench_overhead --out benchmarks/results/overhead.json

The whole mesh over HTTP and the same engine in a process without a bus take turns on the same
checkpoint: single short requests, alternating, for the time to the first token; then full loads.
A bare round trip over NATS takes its turn as well, after the same silence and right after others
like it: the mesh needs four before a first token.

What each side's clock holds. The mesh's: HTTP on an open connection, JSON of the prompt's ids, the
bus, the engine, text, and the client, which runs on the same cores; its share of them is shown.
The engine's: `Engine.add` of the ids, steps until a token is there; no text is made. Both are
loaded, have slept since their last turn, decode greedily, and serve the same process. The
engine is made before its clock starts, as the worker's is; until 2026-11-22 it was made after, and
the mesh's client connected after its clock had started.
"""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.peers.results import ModelResult
from benchmarks.peers.roster import Setting
from benchmarks.peers.session import add_options, run_models
from benchmarks.peers.turns import open_turns
from benchmarks.random_model import ModelShape

_SIDES = ("mesh", "engine", "bus", "warm-bus")
_MODELS = ("qwen2.5-0.5b", "llama-42m")
_SHORT_ANSWER = 2


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="bench_overhead", formatter_class=argparse.RawTextHelpFormatter
    )
    add_options(parser, _MODELS)
    add = parser.add_argument
    add("--requests", type=int, default=50, help="single requests of each side")
    add("--streams", type=int, default=32)
    add("--prompt", type=int, default=128, help="prompt tokens")
    add("--tokens", type=int, default=128, help="output tokens of each stream under load")
    add("--rounds", type=int, default=5, help="full loads of each side")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save; 1 when a side could not be measured."""
    options = parse(arguments)

    async def measure(shape: ModelShape, result: ModelResult, setting: Setting) -> None:
        async with open_turns(shape, result, _SIDES, setting, lambda _: None) as turns:
            for number in range(options.requests):
                await turns.round([1], (options.prompt, _SHORT_ANSWER), number)
            for number in range(options.rounds):
                await turns.round([options.streams], (options.prompt, options.tokens), number)
        print(describe(result, options.streams), flush=True)

    result = run_models(options, measure)
    return 1 if any(model.missing for model in result.models) else 0


def describe(result: ModelResult, streams: int) -> str:
    """One line."""
    added, lost = result.added_ttft_ms, result.lost_throughput(streams)
    if added is None or lost is None:
        return f"{result.name}: not measured: {result.missing}"
    return (
        f"{result.name}: first token {added:+.2f} ms (p50, 1 stream; a round trip over NATS "
        f"{result.round_trip_ms or 0.0:.2f} ms, warm {result.warm_round_trip_ms or 0.0:.2f} ms), "
        f"throughput {-lost:+.1%} ({streams} streams; the client takes "
        f"{result.client_share(streams):.1%} of the cores)"
    )


if __name__ == "__main__":
    sys.exit(main())
