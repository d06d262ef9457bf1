"""A model on two ranks of this machine, one thread each, against one rank with two threads.

    python -m benchmarks.bench_ranks --layers 8 --hidden 2048

Each kind is a process of its own, and they take turns:
  one    one rank with two threads
  two    two ranks with one thread each
  part   what one of two ranks computes, without sums
  turns  two stages of one thread each, one step at a time
  lanes  the same with a step of each lane in flight
  link   the bare sum of a step's rows, a plan's way to a follower, and the same bytes on a socket

Ratios, not times, are what this shows: `step` is a step of two ranks over its own products and as
many bare sums.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from benchmarks.engine_loop import EngineLoop
from benchmarks.random_model import ModelShape, random_prompts, write_checkpoint
from tokenmesh.engine.exec.role import Role
from tokenmesh.engine.plan import StepPlan
from tokenmesh.engine.ranks.ends import end_process
from tokenmesh.engine.ranks.frames import RankDone
from tokenmesh.engine.ranks.ranks import Ranks
from tokenmesh.engine.ranks.rendezvous import join_group, lead_group
from tokenmesh.shared.config.environment import RankPlace, rank_environment, rank_place
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings

KINDS: Final = ("one", "two", "part", "link", "turns", "lanes")
STAGED: Final = ("turns", "lanes")
ROWS: Final = (1, 8)
TOKENS: Final = 24
PREFILL: Final = (8, 1024)
"""Prompts and their tokens."""
CALLS: Final = 300


class NoGroup:
    """Stands for a group whose sums cost nothing."""

    def send(self, *_: object) -> "NoGroup":
        return self

    def recv(self, tensors: list[torch.Tensor], *_: object) -> "NoGroup":
        tensors[0].zero_()
        return self

    def allreduce(self, *_: object) -> "NoGroup":
        return self

    def wait(self) -> None:
        pass


def shape_of(options: argparse.Namespace) -> ModelShape:
    hidden = options.hidden
    config = {
        "vocab_size": 32000,
        "hidden_size": hidden,
        "intermediate_size": 11 * hidden // 4,
        "num_hidden_layers": options.layers,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": max(2, hidden // 512),
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    return ModelShape("ranks", f"Llama, hidden {hidden}, {options.layers} layers", "Llama", config)


def settings_of(kind: str) -> WorkerSettings:
    return WorkerSettings(
        device="cpu",
        cpu_threads=2 if kind == "one" else 1,
        tensor_parallel_size=2 if kind in ("two", "link") else 1,
        pipeline_parallel_size=2 if kind in STAGED else 1,
        num_gpu_blocks_override=1024,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
    )


def measure_engine(kind: str, folder: Path, shape: ModelShape) -> Callable[[], dict[str, float]]:
    """A round of a model: seconds of a decode step by rows, and of the prefill."""
    # draws of a part mean nothing, which changes no time: rows never end early
    role = Role(Ranks(0, 2, NoGroup()), 2) if kind == "part" else None
    loop = EngineLoop(folder, settings_of(kind), role=role)
    if kind == "turns":
        loop.take_turns()

    def measure() -> dict[str, float]:
        found = {}
        for rows in ROWS:
            asks = [(prompt, TOKENS) for prompt in random_prompts(shape, rows, 16)]
            times = loop.run(asks)[0]
            steps = [b - a for a, b in pairwise(times[1:])]
            found[f"step {rows}"] = median(steps)
        count, length = PREFILL
        began = time.perf_counter()
        loop.run([(prompt, 1) for prompt in random_prompts(shape, count, length)])
        found["prefill"] = time.perf_counter() - began
        return found

    return measure


def measure_link(folder: Path, hidden: int) -> Callable[[], dict[str, float]]:
    """A round of bare sums, of plans and of a socket, all with a process of its own."""

    def launch(place: RankPlace) -> Callable[[], bool]:
        command = [sys.executable, "-m", "benchmarks.bench_ranks", "--child", "peer"]
        child = subprocess.Popen(command, env=rank_environment(place))
        return lambda: child.poll() is not None

    group = lead_group(
        ModelSettings(model=str(folder)), settings_of("link"), None, launch, end_process(0)
    )
    link, ranks = group.link, group.ranks
    plan = StepPlan(step=1, decodes=list(range(64)))

    def timed(call: Callable[[], object]) -> float:
        times = []
        for _ in range(CALLS):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return median(times)

    def send() -> None:
        link.send_plan(plan)
        link.wait_done()

    def measure() -> dict[str, float]:
        found = {"plan": timed(send) / 2}
        for rows in ROWS:
            x = torch.zeros(rows, hidden, dtype=torch.bfloat16)
            link.send_plan(StepPlan(step=-rows, decodes=[hidden]))
            found[f"sum {rows}"] = timed(partial(ranks.sum_, x))
        found["socket"] = timed(echo) / 2
        return found

    near = socket.create_server(("127.0.0.1", 0))
    far = subprocess.Popen(
        [sys.executable, "-c", ECHO, str(near.getsockname()[1])], stdin=subprocess.DEVNULL
    )
    connection, _ = near.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def echo() -> None:
        assert far.poll() is None
        connection.sendall(bytes(160))
        connection.recv(16)

    return measure


ECHO: Final = """
import socket, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while True:
    left = 160
    while left:
        data = s.recv(left)
        if not data:
            sys.exit()
        left -= len(data)
    s.sendall(bytes(12))
"""


def peer() -> None:
    """The other end of `measure_link`."""
    place = rank_place()
    assert place is not None
    group = join_group(place, 60.0, end_process(place.rank))
    while isinstance(plan := group.link.work.get(), StepPlan):
        if plan.step > 0:
            group.link.done(RankDone())
            continue
        x = torch.zeros(-plan.step, plan.decodes[0], dtype=torch.bfloat16)
        for _ in range(CALLS):
            group.ranks.sum_(x)


def child(kind: str, folder: Path, shape: ModelShape) -> None:
    """Measure once for each line of the input."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        if kind == "link":
            measure = measure_link(folder, int(shape.config["hidden_size"]))
        else:
            measure = measure_engine(kind, folder, shape)
        print("ready", flush=True)
        for _ in sys.stdin:
            print(json.dumps(measure()), flush=True)


def ratios(seen: dict[str, dict[str, float]], layers: int) -> dict[str, float]:
    """Return what the run shows, from the medians of its rounds."""
    one, two, part, link, turns, lanes = (seen[kind] for kind in KINDS)
    found = {"prefill": one["prefill"] / two["prefill"]}
    for rows in ROWS:
        products = part[f"step {rows}"] + (2 * layers + 1) * link[f"sum {rows}"]
        found[f"decode {rows}"] = one[f"step {rows}"] / two[f"step {rows}"]
        found[f"step {rows}"] = two[f"step {rows}"] / products
    rows = max(ROWS)
    found[f"lanes {rows}"] = lanes[f"step {rows}"] / turns[f"step {rows}"]
    found["lanes prefill"] = lanes["prefill"] / turns["prefill"]
    found["plan"] = link["plan"] / link["socket"]
    return found


def main() -> int:
    """Measure all kinds in turns."""
    parser = argparse.ArgumentParser(description=__doc__, prog="bench_ranks")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", choices=(*KINDS, "peer"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    shape = shape_of(options)
    if options.child == "peer":
        peer()
        return 0
    if options.child:
        child(options.child, options.folder, shape)
        return 0
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = options.folder or Path(temporary)
        if not (folder / "config.json").exists():
            write_checkpoint(shape, folder)
        children: dict[str, Any] = {}
        for kind in KINDS:
            words = ["--layers", str(options.layers), "--hidden", str(options.hidden)]
            command = [sys.executable, "-m", "benchmarks.bench_ranks", "--child", kind]
            process = subprocess.Popen(
                [*command, *words, "--folder", str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.kill)
            children[kind] = process
            assert process.stdout.readline() == "ready\n"  # type: ignore[union-attr]
        for _ in range(options.rounds):
            for kind, process in children.items():
                process.stdin.write("go\n")
                process.stdin.flush()
                rounds[kind].append(json.loads(process.stdout.readline()))
    seen = {
        kind: {name: median(each[name] for each in found) for name in found[0]}
        for kind, found in rounds.items()
    }
    for kind, found in seen.items():
        print(kind, {name: f"{1e3 * value:.3f} ms" for name, value in found.items()})
    print({name: round(value, 2) for name, value in ratios(seen, options.layers).items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
