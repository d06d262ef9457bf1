"""Weights rounded at load beside plain ones, offline, on random weights in bfloat16.

    python -m benchmarks.bench_quantized --threads 2

Loads of one checkpoint take turns: `plain`, `int8`, `int4`, `fp8`. Output tokens per second after
the first token, bytes of all weights, and both as a ratio to `plain` of the same run.
"""

import argparse
import gc
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, get_args

import torch

from benchmarks.engine_loop import EngineLoop
from benchmarks.peers.sample import decode_rate
from benchmarks.random_model import SHAPES, random_prompts, write_checkpoint
from tokenmesh.kernels.linear.formats.round import Rounding
from tokenmesh.services.worker_svc.runner.resident import tensors_of
from tokenmesh.services.worker_svc.runner.runner import TorchRunner
from tokenmesh.shared.config.worker import WorkerSettings

PLAIN: Final = "plain"
FORMS: Final = (PLAIN, *get_args(Rounding))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        prog="bench_quantized",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    add("--forms", choices=FORMS, nargs="+", default=list(FORMS[:3]))
    add("--threads", type=int, default=2)
    add("--batches", type=int, nargs="+", default=[1, 8, 32])
    add("--prompt", type=int, default=32, help="prompt tokens before decoding")
    add("--tokens", type=int, default=16, help="output tokens of each stream")
    add("--rounds", type=int, default=2, help="the best round counts")
    return parser.parse_args(arguments)


def weight_bytes(loop: EngineLoop) -> int:
    """Of all tensors of the model, each once."""
    runner = loop.model.runner
    assert isinstance(runner, TorchRunner)
    found = {each.data_ptr(): each.nbytes for each in tensors_of(runner._model)}
    return sum(found.values())


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    shape = SHAPES[options.model]
    settings = WorkerSettings(
        device="cpu", cpu_threads=options.threads, num_gpu_blocks_override=512
    )
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_checkpoint(shape, directory)
        torch.manual_seed(0)
        loops = {
            name: EngineLoop(directory, settings, quantization=None if name == PLAIN else name)
            for name in options.forms
        }
        gc.collect()
        sizes = {name: weight_bytes(loop) for name, loop in loops.items()}
        rates: dict[tuple[str, int], float] = {}
        for _ in range(options.rounds):
            for batch in options.batches:
                prompts = random_prompts(shape, batch, options.prompt)
                for name, loop in loops.items():
                    times = loop.run([(prompt, options.tokens) for prompt in prompts])
                    key = name, batch
                    rates[key] = max(rates.get(key, 0.0), decode_rate(times))
    report(options, sizes, rates)


def report(
    options: argparse.Namespace, sizes: dict[str, int], rates: dict[tuple[str, int], float]
) -> None:
    """A table of each form's bytes and rates, with ratios to the first form."""
    first = options.forms[0]
    for name in options.forms:
        cells = [f"{sizes[name] / (1 << 20):7.0f} MiB ({sizes[name] / sizes[first]:.2f})"]
        for batch in options.batches:
            rate = rates[name, batch]
            cells.append(f"{batch:3} streams {rate:7.1f} tok/s ({rate / rates[first, batch]:.2f})")
        sys.stdout.write(f"{name:6} {'  '.join(cells)}\n")


if __name__ == "__main__":
    main()
