"""LoRA adapters in the engine: many in a batch, one that is read during running streams, offline.

    python -m benchmarks.bench_adapters --threads 2

Random weights in Qwen2.5-0.5B's shape. Rows take turns, each is an engine without a bus: 8 streams
without adapters and with one each, as many streams as adapters without and with one each. Then the
steps of 16 streams, in turns alone and while an adapter is read.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import transformers

from benchmarks.engine_loop import EngineLoop
from benchmarks.random_model import SHAPES
from benchmarks.random_weights import write_weights
from tests.fakes.adapters import AdapterSpec, write_adapter
from tokenmesh.engine.adapters.adapter import ReadAdapter, lower_priority
from tokenmesh.shared.config.worker import WorkerSettings

PROMPT: Final = 32
NUM_STREAMS: Final = 16
"""Streams that run while an adapter is read."""
TURN: Final = 40
"""Steps with or without a reader."""
WARM_STEPS: Final = 8
QUANTILES: Final = (0.9, 0.99)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="bench_adapters", formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--threads", type=int, default=2)
    add("--adapters", type=int, default=32)
    add("--rank", type=int, default=16)
    add("--tokens", type=int, default=24, help="of each stream")
    add("--rounds", type=int, default=3, help="the median counts")
    add("--turns", type=int, default=4, help="of a reader, in each round")
    add("--only-gaps", action="store_true", help="leave out the throughput")
    add("--shape", default="qwen2.5-0.5b", choices=sorted(SHAPES))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_weights(SHAPES[options.shape], root)
        paths = write_adapters(root, options)
        settings = WorkerSettings.model_validate(
            {
                "device": "cpu",
                "cpu_threads": options.threads,
                "async_scheduling": True,
                "num_gpu_blocks_override": 1024,
                "lora": {"enable_lora": True, "max_lora_rank": max(16, options.rank)},
            }
        )
        loop = EngineLoop(root, settings)
        if not options.only_gaps:
            throughput(loop, [loop.model.adapters.read(path) for path in paths], options)
        gaps(loop, paths[0], options)
    return 0


def write_adapters(root: Path, options: argparse.Namespace) -> list[Path]:
    """Write adapters of random numbers, for all linear layers."""
    config = transformers.AutoConfig.from_pretrained(root)
    with torch.device("meta"):
        tree: Any = transformers.AutoModelForCausalLM.from_config(config)
    specs = [
        AdapterSpec(seed=seed, rank=options.rank, dtype=torch.bfloat16)
        for seed in range(options.adapters)
    ]
    return [write_adapter(tree, root / f"adapter-{each.seed}", each) for each in specs]


def throughput(loop: EngineLoop, read: list[ReadAdapter], options: argparse.Namespace) -> None:
    """Output tokens a second of each row."""
    rows: dict[str, list[ReadAdapter | None]] = {
        "8 streams": [None] * 8,
        "8 streams, 8 adapters": list(read[:8]),
        f"{len(read)} streams": [None] * len(read),
        f"{len(read)} streams, {len(read)} adapters": list(read),
    }
    rates: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(options.rounds):
        for name, adapters in rows.items():
            times = loop.run(asks_of(len(adapters), options.tokens), adapters=adapters)
            first, last = max(each[0] for each in times), max(each[-1] for each in times)
            rates[name].append(len(times) * (options.tokens - 1) / (last - first))
    base = median(next(iter(rates.values())))
    for name, values in rates.items():
        print(f"{name:28} {median(values):8.1f} tokens/s  {median(values) / base:5.2f}x")


def gaps(loop: EngineLoop, path: Path, options: argparse.Namespace) -> None:
    """Times of the steps of 16 streams, alone and during reads of an adapter, in turns."""
    reads = Reads(loop, path)
    alone: list[float] = []
    during: list[float] = []
    loop.run(asks_of(NUM_STREAMS, options.tokens))
    for _ in range(options.rounds):
        steps = loop.steps(asks_of(NUM_STREAMS, 2 * (WARM_STEPS + TURN * options.turns)))
        for _ in range(WARM_STEPS):
            next(steps)
        for turn in range(2 * options.turns):
            times = alone if turn % 2 == 0 else during
            with reads.running() if turn % 2 else nullcontext():
                for _ in range(TURN):
                    began = time.perf_counter()
                    next(steps)
                    times.append(time.perf_counter() - began)
        for _ in steps:
            pass
    reads.close()
    for name, times in (("alone", alone), ("during reads", during)):
        shares = [f"{100 * q:g} % {1e3 * quantile(times, q):.1f}" for q in QUANTILES]
        print(
            f"{NUM_STREAMS} streams {name:13} {len(times)} steps: "
            f"median {1e3 * median(times):.1f} ms, {', '.join(shares)}, "
            f"longest {1e3 * max(times):.1f}"
        )
    more = [f"{100 * q:g} % {quantile(during, q) / quantile(alone, q):.2f}x" for q in QUANTILES]
    print(
        f"during / alone: median {median(during) / median(alone):.2f}x, {', '.join(more)}, "
        f"longest {max(during) / max(alone):.2f}x; a read of {reads.nbytes / 1e6:.0f} MB takes "
        f"{median(reads.seconds):.2f} s"
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Reads:
    """Reads one adapter again and again in a thread of its own, while it may."""

    def __init__(self, loop: EngineLoop, path: Path) -> None:
        self._loop, self._path = loop, path
        self._may_run, self._ends = threading.Event(), False
        self.seconds: list[float] = []
        self.nbytes = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @contextmanager
    def running(self) -> Iterator[None]:
        self._may_run.set()
        yield
        self._may_run.clear()

    def close(self) -> None:
        self._ends = True
        self._may_run.set()
        self._thread.join()

    def _run(self) -> None:
        lower_priority()
        while self._may_run.wait() and not self._ends:
            began = time.perf_counter()
            self.nbytes = self._loop.model.adapters.read(self._path).matrices.nbytes
            self.seconds.append(time.perf_counter() - began)


def asks_of(count: int, num_tokens: int) -> list[tuple[list[int], int]]:
    """Prompts that share nothing."""
    return [([100 + stream] * PROMPT, num_tokens) for stream in range(count)]


if __name__ == "__main__":
    sys.exit(main())
