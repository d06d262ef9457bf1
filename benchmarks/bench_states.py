"""Time to first token of a model with states after a beginning that other prompts had, offline.

    python -m benchmarks.bench_states --threads 2

Random weights in Qwen3-Next's shape, about 0.1 B. In each round four prompts come one after the
other: the first two and the third share their beginning and nothing else, the last is the third
again. One engine has the prefix cache, the other has not; they take turns.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

import torch
import transformers

from benchmarks.engine_loop import EngineLoop
from tokenmesh.shared.config.worker import WorkerSettings

PROMPTS: Final = ("first", "second", "third", "third again")
VOCAB: Final = 16_000


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="bench_states", formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--threads", type=int, default=2)
    add("--shared", type=int, default=1000, help="tokens that the prompts begin with alike")
    add("--own", type=int, default=100, help="tokens of each prompt behind them")
    add("--rounds", type=int, default=5, help="the median counts")
    add("--interval", type=int, default=512, help="worker.mamba_block_size")
    add("--clock", choices=("wall", "cpu"), default="wall")
    return parser.parse_args(arguments)


def write_checkpoint(folder: Path) -> int:
    """Save a model; its parameters."""
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=512,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return int(sum(each.numel() for each in model.parameters()))


def load(folder: Path, interval: int, *, is_cached: bool) -> EngineLoop:
    """An engine with the prefix cache or without."""
    settings = WorkerSettings(
        enable_prefix_caching=is_cached,
        mamba_block_size=interval,
        num_gpu_blocks_override=2048,
        max_num_seqs=16,
        device="cpu",
    )
    return EngineLoop(folder, settings, dtype="float32", keeps_cache=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    times: dict[bool, list[list[float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        print(f"{write_checkpoint(Path(folder)) / 1e6:.0f} M parameters, float32", flush=True)
        loops = {each: load(Path(folder), options.interval, is_cached=each) for each in times}
        generator = torch.Generator().manual_seed(1)

        def random_ids(count: int) -> list[int]:
            ids = torch.randint(VOCAB, (count,), generator=generator)
            return [int(each) for each in ids]

        for _ in range(options.rounds + 1):
            shared = random_ids(options.shared)
            prompts = [shared + random_ids(options.own) for _ in range(3)]
            for is_cached, loop in loops.items():
                taken = []
                for prompt in [*prompts, prompts[-1]]:
                    began_s = clock()
                    loop.run([(prompt, 1)], clock)
                    taken.append(clock() - began_s)
                times[is_cached].append(taken)
    for at, name in enumerate(PROMPTS):
        # the first round warms up
        cached, plain = (median(each[at] for each in times[key][1:]) for key in (True, False))
        print(
            f"{name}: {1e3 * cached:.0f} ms with the prefix cache, {1e3 * plain:.0f} ms without, "
            f"{plain / cached:.2f}x"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
