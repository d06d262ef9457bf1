"""Prompts in our engine compared with their matrix products in oneDNN, in turns, in one process.

    python -m benchmarks.bench_prefill FILE.gguf qwen2.5-0.5b llama-42m --prompts 1024 4096

A model is a file, a directory or a shape of `benchmarks.random_model`, which gets random weights.
Work is the products of all layers, two operations for a number of a weight and a token, and the
products of attention, each key of a query's own past counted. Printed are operations a second of a
whole prompt, of oneDNN's products of bfloat16 in the chunks that the engine takes, and the ratio;
the second ratio leaves attention out of the work, but not out of the time.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

# before torch starts its threads: those that spin would take time from the other side
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from benchmarks.engine_loop import EngineLoop
from benchmarks.random_model import SHAPES
from benchmarks.random_weights import write_weights
from tokenmesh.engine.models.native.config import DecoderConfig
from tokenmesh.engine.models.native.decoder import Decoder
from tokenmesh.kernels.linear import OneDnnWeight
from tokenmesh.shared.config.worker import WorkerSettings

_FIRST_ID: Final = 3
_NUM_IDS: Final = 20_000


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        prog="bench_prefill",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("models", nargs="+", help=f"files, directories, or {', '.join(SHAPES)}")
    add("--threads", type=int, default=2)
    add("--prompts", type=int, nargs="+", default=[1024, 4096], help="lengths, in tokens")
    add("--rounds", type=int, default=3, help="the best round of each side counts")
    add("--cpu-time", action="store_true", help="for one thread on a busy machine")
    return parser.parse_args(arguments)


def products_of(config: DecoderConfig) -> list[tuple[int, int]]:
    """Outputs and inputs of a layer's products. The head multiplies one token of a prompt."""
    hidden, size = config.hidden_size, config.head_dim
    heads, inner = config.num_heads * size, config.intermediate_size
    return [
        (heads + 2 * config.num_kv_heads * size, hidden),
        (hidden, heads),
        (2 * inner, hidden),
        (hidden, inner),
    ]


def attention_work(config: DecoderConfig, length: int) -> float:
    """Operations of scores and of values, by the keys that each token sees."""
    work = 0.0
    for layer in config.layers:
        window = min(layer.window or length, length)
        seen = window * (window + 1) / 2 + (length - window) * window
        work += 4 * seen * config.num_heads * config.head_dim
    return work


class OneDnn:
    """A layer's products on as many tokens as a prompt has, chunk by chunk."""

    def __init__(self, config: DecoderConfig, chunk: int) -> None:
        self._chunk, self._depth = chunk, len(config.layers)
        shapes = products_of(config)
        self._weights = [
            OneDnnWeight.pack(torch.randn(shape).to(torch.bfloat16), None) for shape in shapes
        ]
        self._x = [torch.randn(chunk, width).to(torch.bfloat16) for _, width in shapes]

    def run(self, length: int) -> None:
        for first in range(0, length, self._chunk):
            count = min(self._chunk, length - first)
            for _ in range(self._depth):
                for weight, x in zip(self._weights, self._x, strict=True):
                    weight.product(x[:count])


def measure(directory: Path, options: argparse.Namespace) -> list[str]:
    """Lines about one model."""
    settings = WorkerSettings(
        device="cpu", cpu_threads=options.threads, enable_prefix_caching=False
    )
    loop = EngineLoop(directory, settings)
    model: Any = loop.model.resident
    decoder = model._model
    assert isinstance(decoder, Decoder), "it is not a native decoder"
    config = decoder.config
    peer = OneDnn(config, settings.max_num_batched_tokens)
    lines, clock = [], time.process_time if options.cpu_time else time.perf_counter
    for length in options.prompts:
        ids = [_FIRST_ID + i % _NUM_IDS for i in range(length)]
        ours, theirs = [], []
        for _ in range(1 + options.rounds):
            torch.set_num_threads(1)
            ours.append(_seconds(clock, partial(loop.run, [(ids, 1)])))
            torch.set_num_threads(options.threads)
            theirs.append(_seconds(clock, partial(peer.run, length)))
        own_s, peer_s = min(ours[1:]), min(theirs[1:])
        weights = len(config.layers) * sum(rows * width for rows, width in products_of(config))
        products, attention = 2.0 * weights * length, attention_work(config, length)
        rate, peer_rate = (products + attention) / own_s, products / peer_s
        lines.append(
            f"  {length} tokens: {length / own_s:,.0f} tokens/s, {rate / 1e9:,.0f} GFLOP/s "
            f"({attention / (products + attention):.0%} attention); oneDNN's products "
            f"{peer_rate / 1e9:,.0f}; ratio {rate / peer_rate:.2f}, without attention's work "
            f"{peer_s / own_s:.2f}"
        )
    return lines


def _seconds(clock: Callable[[], float], run: Callable[[], object]) -> float:
    began_s = clock()
    run()
    return clock() - began_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = parse(arguments)
    for name in options.models:
        with ExitStack() as stack:
            directory = Path(name)
            if name in SHAPES:
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                write_weights(SHAPES[name], directory)
            sys.stdout.write("\n".join([name, *measure(directory, options)]) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
