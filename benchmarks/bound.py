"""Compares a decode step of one stream with a plain read of as many bytes as the weights have.

    python -m benchmarks.bound --threads 2 --models qwen2.5-0.5b llama-42m
    python -m benchmarks.bound --threads 2 --checkpoints DIRECTORY

Steps and reads alternate in one process, so both see the same memory bus: on a shared machine it is
often twice as fast a second later. Every kind of read takes its turn; the fastest by its median
counts.
"""

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Final

import torch

from benchmarks.engine_loop import EngineLoop
from benchmarks.engine_results import BoundLine, BoundResult
from benchmarks.limits import plain_reads
from benchmarks.random_model import SHAPES, write_checkpoint
from benchmarks.serve.results import environment, write_json
from tokenmesh.shared.config.worker import WorkerSettings

_PROMPT: Final = 128
_STEPS: Final = 128
_WARM_STEPS: Final = 8


def measure_bound(name: str, directory: Path, threads: int, num_steps: int = _STEPS) -> BoundLine:
    """Decode `num_steps` tokens of one stream, a read after each; medians of both."""
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    # One stream: the states of 256 would not fit compared with peers that hold their memory.
    worker = WorkerSettings(cpu_threads=threads, enable_prefix_caching=False, max_num_seqs=1)
    loop = EngineLoop(directory, worker)
    torch.set_num_threads(threads)
    reads = plain_reads(size)
    kinds = itertools.cycle(reads)
    steps: list[float] = []
    times: dict[str, list[float]] = {kind: [] for kind in reads}
    began_s = time.perf_counter()
    for _ in loop.steps([(list(range(_PROMPT)), _WARM_STEPS + num_steps)]):
        steps.append(time.perf_counter() - began_s)
        kind = next(kinds)
        began_s = time.perf_counter()
        reads[kind]()
        times[kind].append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
    fastest = min(times, key=lambda kind: median(times[kind]))
    step_ms, read_ms = (
        round(median(each) * 1e3, 3) for each in (steps[_WARM_STEPS:], times[fastest])
    )
    return BoundLine(name, step_ms, read_ms, fastest)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="bound", formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--models", choices=sorted(SHAPES), nargs="+", default=["qwen2.5-0.5b", "llama-42m"])
    add("--checkpoints", type=Path, nargs="+", help="directories in place of random weights")
    add("--threads", type=int, default=2)
    add("--steps", type=int, default=_STEPS)
    add("--out", type=Path, help="write the numbers")
    return parser.parse_args(arguments)


def measure_all(options: argparse.Namespace) -> Iterator[BoundLine]:
    """One model after the other."""
    for directory in options.checkpoints or ():
        yield measure_bound(directory.name, directory, options.threads, options.steps)
    for name in () if options.checkpoints else options.models:
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(SHAPES[name], Path(folder))
            yield measure_bound(name, Path(folder), options.threads, options.steps)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the shares and, with --out, write them."""
    options = parse(arguments)
    place = environment()
    lines = []
    for line in measure_all(options):
        lines.append(line)
        times = f"a step {line.step_ms} ms, a read {line.read_ms} ms"
        print(f"{line.model}: {times}, {line.share:.0%} of the bound", flush=True)
    if options.out is not None:
        write_json(options.out, BoundResult(options.threads, place, os.getloadavg()[0], lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
