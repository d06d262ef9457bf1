"""LoRA adapters in the engine: many in a batch, one that is read beside running streams, offline.

    python -m benchmarks.bench_adapters --threads 2

Random weights in Qwen2.5-0.5B's shape. Rows take turns, each is an engine without a bus: 8 streams
without adapters, as many streams as adapters without and with one each. Then the longest time
between two steps of 16 streams, alone and while an adapter is read.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import transformers

from benchmarks.engine_loop import EngineLoop
from benchmarks.random_model import SHAPES
from benchmarks.random_weights import write_weights
from tests.fakes.adapters import AdapterSpec, write_adapter
from tokenmesh.services.worker_svc.adapters.adapter import ReadAdapter, lower_priority
from tokenmesh.shared.config.worker import WorkerSettings

PROMPT: Final = 32
BESIDE: Final = 16
"""Streams beside which an adapter is read."""


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
        read = [loop.model.adapters.read(path) for path in paths]
        throughput(loop, read, options)
        gaps(loop, paths[0], options)
    return 0


def write_adapters(root: Path, options: argparse.Namespace) -> list[Path]:
    """Of random numbers, for all linear layers."""
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
    """The longest time between two tokens, in milliseconds, alone and beside a read."""
    asks = asks_of(BESIDE, 2 * options.tokens)
    loop.run(asks)
    alone = longest(loop.run(asks))
    ends = threading.Event()
    reads = []

    def read_again() -> None:
        lower_priority()
        while not ends.is_set():
            began = time.perf_counter()
            loop.model.adapters.read(path)
            reads.append(time.perf_counter() - began)

    thread = threading.Thread(target=read_again)
    thread.start()
    beside = longest(loop.run(asks))
    ends.set()
    thread.join()
    print(f"longest gap of {BESIDE} streams: {1e3 * alone:.0f} ms alone, {1e3 * beside:.0f} ms "
          f"while adapters are read, {1e3 * median(reads):.0f} ms each")  # fmt: skip


def longest(times: list[list[float]]) -> float:
    """The longest time between two tokens of one stream."""
    return max(b - a for each in times for a, b in pairwise(each))


def asks_of(count: int, num_tokens: int) -> list[tuple[list[int], int]]:
    """Prompts that share nothing."""
    return [([100 + stream] * PROMPT, num_tokens) for stream in range(count)]


if __name__ == "__main__":
    sys.exit(main())
