"""Output tokens per second of the whole mesh over HTTP against transformers.generate, in one run.

    python -m benchmarks.bench_mesh --out benchmarks/results/mesh-2cores.json

Random weights on the shape of Qwen2.5-0.5B in bfloat16; both sides get the same prompts and count
the same output tokens over the same span, first request to last token. They take turns,
so that both see the machine as it is at that time; the best round of each counts.
"""

import os

# Before torch starts its threads: idle ones must not spin while the other side is measured.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_engine import make_checkpoint, prompts_of
from benchmarks.serve.client import Server
from benchmarks.serve.load import Load
from benchmarks.serve.own_mesh import own_mesh
from benchmarks.serve.report import ROOT, environment, summarize
from benchmarks.serve.workload import Ask, Shape

_MODEL = "bench"
_TIMEOUT_S = 600.0
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, prog="bench_mesh")
    add = parser.add_argument
    add("--batches", type=int, nargs="+", default=[1, 8])
    add("--prompt", type=int, default=64, help="prompt tokens")
    add("--tokens", type=int, default=64, help="output tokens of each stream")
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=2)
    add("--out", type=Path, help="write the numbers as JSON")
    return parser.parse_args(arguments)


@dataclass
class Rounds:
    """Tokens per second, one number a round."""

    mesh: list[float] = field(default_factory=list)
    transformers: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Best against best."""
        return max(self.mesh) / max(self.transformers)


async def measure_mesh(url: str, prompts: list[list[int]], num_tokens: int) -> float:
    """All prompts at once over HTTP, streaming. Raises RuntimeError when one fails."""
    shape = Shape(_MODEL, "completions", 0.0, ignore_eos=True)
    load = Load(Server(url, None), shape, len(prompts), _TIMEOUT_S, lambda _: None)
    try:
        summary = summarize(await load.closed([Ask(prompt, num_tokens) for prompt in prompts]))
    finally:
        load.close()
    if summary["errors"]:
        raise RuntimeError(f"requests failed: {summary['errors']}")
    return summary["output_tokens_per_s"]


def measure_transformers(model: Any, prompts: list[list[int]], num_tokens: int) -> float:
    """One static batch."""
    ids = torch.tensor(prompts)
    started_s = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return len(prompts) * num_tokens / (time.perf_counter() - started_s)


def prepare(folder: Path) -> Any:
    """A checkpoint with a tokenizer; returns transformers' model of it."""
    model = make_checkpoint(folder)
    for name in _TOKENIZER_FILES:
        shutil.copy(ROOT / "tokenmesh" / "demo_model" / name, folder / name)
    return model


async def compare(options: argparse.Namespace, folder: Path) -> dict[int, Rounds]:
    """Take turns."""
    model = prepare(folder)
    up = [str(folder), "--served-model-name", _MODEL, "--dtype", "bfloat16"]
    up += ["--no-enable-prefix-caching", "--max-model-len", "2048"]
    threads = {"TOKENMESH_WORKER__CPU_THREADS": str(options.threads)}
    found = {batch: Rounds() for batch in options.batches}
    async with own_mesh(up, threads, folder / "mesh.log") as url:
        await measure_mesh(url, prompts_of(2, options.prompt), 4)
        for batch, rounds in found.items():
            prompts = prompts_of(batch, options.prompt)
            for _ in range(options.rounds):
                rounds.mesh.append(await measure_mesh(url, prompts, options.tokens))
                speed = await asyncio.to_thread(
                    measure_transformers, model, prompts, options.tokens
                )
                rounds.transformers.append(speed)
            print(
                f"{batch} streams: mesh {max(rounds.mesh):.1f} tokens/s, transformers "
                f"{max(rounds.transformers):.1f}, ratio {rounds.ratio:.2f}",
                flush=True,
            )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and save."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(compare(options, Path(folder)))
    if options.out:
        results = {
            str(batch): {"mesh": each.mesh, "transformers": each.transformers, "ratio": each.ratio}
            for batch, each in found.items()
        }
        saved = {"config": vars(options), "environment": environment(), "results": results}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(saved, indent=2, default=str) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
