"""The engine by itself, offline, on random weights of a real shape in bfloat16.

    python -m benchmarks.bench_engine --threads 2
    python -m benchmarks.bench_engine --threads 1 --batches 1 8 --clock cpu
    python -m benchmarks.bench_engine --workload nano --requests 16 --peer transformers

`decode`: output tokens per second after the first token, compared with transformers.generate in
the same process; `--clock cpu` counts processor time, which is steady on a machine that others use
as well. Both run on a GPU where torch finds one.
`nano`: nano-vllm's 256 requests of 100 to 1,024 tokens in and out, prefill included; `--peer
transformers` runs its continuous batching on the same requests.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_loop import Ask, Clock, EngineLoop
from benchmarks.engine_results import DecodeLine, EngineResult, NanoLine
from benchmarks.nano_workload import REQUESTS, TEMPERATURE, nano_asks
from benchmarks.peers.sample import decode_rate
from benchmarks.peers.transformers_runs import continuous, generate
from benchmarks.random_model import SHAPES, random_prompts, write_checkpoint
from benchmarks.serve.results import environment, write_json
from tokenmesh.shared.config.worker import WorkerSettings


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="bench_engine", formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--workload", choices=("decode", "nano"), default="decode")
    add("--model", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    add("--threads", type=int, default=2)
    add("--batches", type=int, nargs="+", default=[1, 8], help="decode")
    add("--prompt", type=int, default=64, help="decode: prompt tokens")
    add("--tokens", type=int, default=64, help="decode: output tokens of each stream")
    add("--rounds", type=int, default=3, help="decode: the best round counts")
    add("--clock", choices=("wall", "cpu"), default="wall", help="decode")
    add("--requests", type=int, default=REQUESTS, help="nano: the first so many")
    add("--peer", choices=("transformers",), help="nano: run the same requests on it")
    add("--json", type=Path, help="write the numbers")
    return parser.parse_args(arguments)


def compare_decode(options: argparse.Namespace, loop: EngineLoop, model: Any) -> list[DecodeLine]:
    """Take turns, batch by batch."""
    clock: Clock = time.perf_counter if options.clock == "wall" else time.process_time
    lines = []
    for batch in options.batches:
        prompts = random_prompts(SHAPES[options.model], batch, options.prompt)
        # The first token is the prefill's.
        count = options.tokens + 1
        ours, theirs = [], []
        for _ in range(options.rounds):
            ours.append(decode_rate(loop.run([(prompt, count) for prompt in prompts], clock)))
            theirs.append(decode_rate(generate(model, prompts, count, clock)))
        lines.append(DecodeLine(batch, round(max(ours), 2), round(max(theirs), 2)))
        print(
            f"batch {batch}: engine {max(ours):.1f} tokens/s, transformers {max(theirs):.1f}, "
            f"ratio {max(ours) / max(theirs):.2f} ({options.threads} threads, {options.clock})",
            flush=True,
        )
    return lines


def run_nano(options: argparse.Namespace, loop: EngineLoop, model: Any) -> NanoLine:
    """Ours first, then the peer."""
    asks = nano_asks(options.requests)
    loop.run([([1, 2, 3], 2)])
    started_s = time.perf_counter()
    loop.run(asks, temperature=TEMPERATURE)
    engine_s = time.perf_counter() - started_s
    transformers_s = time_continuous(model, asks) if options.peer else None
    line = NanoLine(
        requests=len(asks),
        prompt_tokens=sum(len(prompt) for prompt, _ in asks),
        output_tokens=sum(length for _, length in asks),
        engine_s=round(engine_s, 2),
        transformers_s=transformers_s,
    )
    print(f"{line.requests} requests: engine {line.output_tokens / engine_s:.1f} output tokens/s")
    if transformers_s:
        print(f"transformers continuous batching: {line.output_tokens / transformers_s:.1f}")
    return line


def time_continuous(model: Any, asks: Sequence[Ask]) -> float:
    """Seconds that transformers' continuous batching takes."""
    with continuous(model, TEMPERATURE) as run:
        run([([1, 2, 3], 2)])
        started_s = time.perf_counter()
        run(asks)
        return round(time.perf_counter() - started_s, 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and, with --json, save."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    result = EngineResult(
        config={
            **{key: value for key, value in vars(options).items() if key != "json"},
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        },
        environment=environment(),
        load_average_end=0.0,
    )
    settings = WorkerSettings(enable_prefix_caching=False)
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(SHAPES[options.model], Path(folder))
        if torch.cuda.is_available() and (options.workload == "decode" or options.peer):
            # before the engine, which takes what it finds free
            model = model.to("cuda")
        loop = EngineLoop(Path(folder), settings)
        if options.workload == "decode":
            result.decode = compare_decode(options, loop, model)
        else:
            result.nano = run_nano(options, loop, model)
    result.load_average_end = os.getloadavg()[0]
    if options.json is not None:
        write_json(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
