"""Gaps of decode streams while long prompts arrive, with prefill apart from decode and without.

Three meshes of `sim` workers in turns, real processes, two workers each: ordinary ones without long
prompts, the same with them, and one that computes prompts for one that decodes. Streams that decode
and prompts that are new to it are the same in all of them; a prompt has one output token.
Exits with 1 where the p99 of gaps with prefill apart is above `--bound` times that without prompts.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import msgspec
import uvloop

from benchmarks.chaos_run.cluster import Cluster
from benchmarks.options import add_cluster_options
from benchmarks.replay_run.player import Player
from benchmarks.replay_run.prompts import Prompts
from benchmarks.replay_run.trace import BLOCK_TOKENS, Entry
from benchmarks.serve.results import environment, write_json
from tokenmesh.cli.bench.client import StreamChunk, Target
from tokenmesh.cli.bench.load import fault
from tokenmesh.cli.bench.report import percentile
from tokenmesh.cli.bench.workload import first_model
from tokenmesh.cli.embedded.private import private_folder
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.loader import DEMO_MODEL, load_settings

ALONE: Final = "no prompts"
ORDINARY: Final = "ordinary workers"
APART: Final = "prefill apart"
_WORKERS: Final[Mapping[str, tuple[int, int]]] = {
    ALONE: (2, 0),
    ORDINARY: (2, 0),
    APART: (1, 1),
}
"""Workers, and those that compute prompts for them."""
_DECODE_PROMPT: Final = 32
_TIMEOUT_S: Final = 300.0


class Gaps(msgspec.Struct):
    """It holds what the clients of one mesh saw, in milliseconds."""

    p50_ms: float
    p99_ms: float
    """Between two deliveries of a stream that decodes."""
    prompt_p50_ms: float | None
    """From sending a long prompt to its token; None without such prompts."""
    errors: list[str]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, prog="bench_prefill_apart")
    add = parser.add_argument
    add("--streams", type=int, default=8, help="that decode")
    add("--seconds", type=float, default=20.0, help="of each mesh")
    add("--prompt", type=int, default=4096, help="tokens of a long prompt")
    add("--rate", type=float, default=0.5, help="long prompts a second")
    add("--prefill-speed", type=float, default=8_000.0, help="tokens a second of a worker")
    add("--step", type=float, default=0.012, help="seconds of a worker's step, at least")
    add("--bound", type=float, default=1.3, help="on the ratio of the p99 of gaps")
    add_cluster_options(parser)
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace, kind: str) -> Settings:
    """The bundled model, simulated as one of some billions of parameters on a GPU."""
    workers, prefill_workers = _WORKERS[kind]
    return load_settings(
        None,
        {
            "model": {"max_model_len": options.prompt + 2 * BLOCK_TOKENS},
            "worker": {
                "engine": "sim",
                "sim_step_s": options.step,
                "sim_prefill_tokens_per_s": options.prefill_speed,
                "max_num_batched_tokens": options.prompt,
                "kv_offloading_size": 0.25,
            },
            "up": {"workers": workers, "prefill_workers": prefill_workers},
        },
    )


async def _decode(server: Target, body: dict[str, object], until: float) -> list[float]:
    """Return when deliveries of streams came, one stream after the other until then; each stream
    ends with infinity. Raises RuntimeError for an answer that is an error."""
    came: list[float] = []

    def on_chunk(chunk: StreamChunk) -> None:
        if chunk.choices:
            came.append(time.perf_counter())

    while time.perf_counter() < until:
        connection = await server.connect()
        try:
            request = server.request("POST", "/v1/completions", body)
            reply = await connection.send(request, on_chunk)
        finally:
            connection.close()
        if error := fault(reply, int(str(body["max_tokens"]))):
            raise RuntimeError(error)
        came.append(float("inf"))
    return came


async def measure(options: argparse.Namespace, kind: str, cluster: Cluster) -> Gaps:
    """The streams and prompts of `kind`."""
    vocab_size = json.loads((DEMO_MODEL / "config.json").read_bytes())["vocab_size"]
    server = Target(cluster.urls[0], None)
    model, prompts = await first_model(server), Prompts(vocab_size)
    player = Player([server], model, prompts, speed=1.0, timeout_s=_TIMEOUT_S)
    blocks = -(-options.prompt // BLOCK_TOKENS)

    def entry(number: int, at_s: float) -> Entry:
        first = number * blocks
        return Entry(1e3 * at_s, options.prompt, 1, list(range(first, first + blocks)))

    # speeds of workers are learned from prompts that were computed
    await player.play([entry(1 << 20 | number, 0.0) for number in range(4)])
    until = time.perf_counter() + options.seconds
    bodies = [
        {
            "model": model,
            "prompt": [number + 1] * _DECODE_PROMPT,
            "max_tokens": int(options.seconds / options.step / 4),
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for number in range(options.streams)
    ]
    decoding = asyncio.gather(*(_decode(server, body, until) for body in bodies))
    count = 0 if kind == ALONE else int(options.seconds * options.rate)
    played = await player.play([entry(number, number / options.rate) for number in range(count)])
    gaps = [
        1e3 * (after - before)
        for came in await decoding
        for before, after in pairwise(came)
        if before < after < float("inf")
    ]
    firsts = sorted(1e3 * each.first_s for each in played if each.first_s is not None)
    return Gaps(
        p50_ms=round(percentile(sorted(gaps), 50), 1),
        p99_ms=round(percentile(sorted(gaps), 99), 1),
        prompt_p50_ms=round(percentile(firsts, 50), 1) if firsts else None,
        errors=sorted({each.error for each in played if each.error is not None}),
    )


async def run(options: argparse.Namespace) -> dict[str, Gaps]:
    """On meshes of its own. Raises RuntimeError when one does not start."""
    found = {}
    for kind in _WORKERS:
        with private_folder() as folder:
            logs = (options.logs or folder) / kind.replace(" ", "-")
            logs.mkdir(parents=True, exist_ok=True)
            cluster = Cluster(settings_of(options, kind), folder, logs, num_gateways=1)
            try:
                await cluster.start()
                found[kind] = await measure(options, kind, cluster)
            finally:
                await cluster.stop()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where the ratio is within the bound and no prompt failed."""
    options = parse(arguments)
    found = uvloop.run(run(options))
    ratios = {
        kind: round(found[kind].p99_ms / found[ALONE].p99_ms, 3) for kind in (ORDINARY, APART)
    }
    whole = {
        "config": vars(options),
        "environment": environment(),
        "gaps": msgspec.to_builtins(found),
        "ratios_p99": ratios,
    }
    if options.out:
        write_json(options.out, whole)
    print(json.dumps(whole, indent=2, default=str))
    return int(ratios[APART] > options.bound or any(each.errors for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
