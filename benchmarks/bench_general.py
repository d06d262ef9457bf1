"""The general kind of model compared with the native one, offline, on random weights in bfloat16.

    python -m benchmarks.bench_general --threads 2

Loads of one checkpoint: `native`; `promoted`, a module tree of transformers that was read as a
native decoder; `swapped`, the tree with our products, norms and MLPs; `plain`, the tree as it is;
`generate`, transformers alone, with a static batch. They take turns. Output tokens per second after
the first token, and those of one long prompt.

With `--no-c` all of them run without the C kernels: `native` is then our decoder in torch.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol
from unittest.mock import patch

import torch

from benchmarks.engine_loop import Ask, Clock, EngineLoop
from benchmarks.peers.sample import decode_rate
from benchmarks.peers.transformers_runs import generate
from benchmarks.random_model import SHAPES, random_prompts, write_checkpoint
from tokenmesh.engine.models.promotion.read_heads import Unread
from tokenmesh.engine.models.tree import build
from tokenmesh.shared.config.worker import WorkerSettings

FORMS: Final = ("native", "promoted", "swapped", "plain", "generate")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="bench_general", formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    add("--forms", choices=FORMS, nargs="+", default=list(FORMS[:4]))
    add("--threads", type=int, default=2)
    add("--batches", type=int, nargs="+", default=[1, 8])
    add("--prompt", type=int, default=64, help="prompt tokens before decoding")
    add("--tokens", type=int, default=32, help="output tokens of each stream")
    add("--prefill", type=int, default=512, help="tokens of the long prompt")
    add("--rounds", type=int, default=3, help="the best round counts")
    add("--no-c", action="store_true", help="without the C kernels")
    add("--clock", choices=("wall", "cpu"), default="wall")
    return parser.parse_args(arguments)


def form(name: str) -> AbstractContextManager[Any]:
    """Within it models are loaded in that form."""

    def stay_a_tree(*_arguments: Any) -> NoReturn:
        raise Unread("the benchmark asks for the tree")

    match name:
        case "swapped":
            return patch.multiple(build, promote=stay_a_tree)
        case "plain":
            return patch.multiple(build, promote=stay_a_tree, swap=lambda *_arguments: None)
        case _:
            return nullcontext()


class Loop(Protocol):
    """One load of the checkpoint."""

    def run(self, asks: Sequence[Ask], clock: Clock = ...) -> list[list[float]]:
        """See `EngineLoop.run`."""


class Generate:
    """transformers' generate; the prompts and outputs of a batch are of one length each."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def run(self, asks: Sequence[Ask], clock: Clock = time.perf_counter) -> list[list[float]]:
        """See `EngineLoop.run`."""
        return generate(self._model, [prompt for prompt, _ in asks], asks[0][1], clock)


def load(name: str, folder: Path, has_kernels: bool = True) -> Loop:
    """The checkpoint in one of FORMS."""
    if name == "generate":
        return Generate(folder)
    impl: Any = "native" if name == "native" else "transformers"
    settings = WorkerSettings(
        enable_prefix_caching=False, num_gpu_blocks_override=4096, native_kernels=has_kernels
    )
    with form(name):
        return EngineLoop(folder, settings, model_impl=impl)


def measure(
    options: argparse.Namespace, loops: dict[str, Loop], one: Callable[[Loop], float]
) -> dict[str, float]:
    """The largest of all rounds by form; they take turns."""
    best = dict.fromkeys(loops, 0.0)
    for _ in range(options.rounds):
        for name, loop in loops.items():
            best[name] = max(best[name], one(loop))
    return best


def show(what: str, rates: dict[str, float]) -> None:
    """Tokens per second, and by how much native, or else the fastest, is faster."""
    fastest = rates.get("native") or max(rates.values())
    parts = [f"{name} {rate:.1f} ({fastest / rate:.2f}x)" for name, rate in rates.items()]
    print(f"{what}: {', '.join(parts)} tokens/s", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    shape = SHAPES[options.model]
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(shape, Path(folder))
        gc.collect()
        loops = {name: load(name, Path(folder), not options.no_c) for name in options.forms}
        for batch in options.batches:
            prompts = random_prompts(shape, batch, options.prompt)
            asks = [(prompt, options.tokens + 1) for prompt in prompts]

            def decode(loop: Loop, asks: list[Ask] = asks) -> float:
                return decode_rate(loop.run(asks, clock))

            show(f"decode, {batch} streams", measure(options, loops, decode))
        (prompt,) = random_prompts(shape, 1, options.prefill)

        def prefill(loop: Loop) -> float:
            began_s = clock()
            loop.run([(prompt, 1)], clock)
            return len(prompt) / (clock() - began_s)

        show(f"prefill, {len(prompt)} tokens", measure(options, loops, prefill))
    return 0


if __name__ == "__main__":
    sys.exit(main())
