"""Output tokens per second of the engine against transformers.generate, on random weights.

    python -m benchmarks.bench_engine --threads 2
    python -m benchmarks.bench_engine --threads 1 --batches 1 8 --clock cpu

Both run in this process, one after the other, on the shape of Qwen2.5-0.5B in bfloat16. `--clock
cpu` counts processor time, which is steady on a machine that others use as well.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tokenmesh.services.worker_svc.engine.engine import Engine
from tokenmesh.services.worker_svc.engine.request import Request, StreamKey
from tokenmesh.services.worker_svc.runner.build import LoadedModel, build_runner
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.ids import GatewayId, RequestId
from tokenmesh.shared.messages.sampling import SamplingParams

QWEN_SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}

Clock = Callable[[], float]


def make_checkpoint(directory: Path) -> Any:
    """Write random weights of the Qwen2.5-0.5B shape; returns transformers' model."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(**QWEN_SHAPE, dtype="bfloat16")
    model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).eval()
    model.save_pretrained(directory)
    return model


def prompts_of(batch: int, length: int) -> list[list[int]]:
    """Random ids."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 150000, (batch, length), generator=generator).tolist()


class EngineBench:
    """The engine without a bus."""

    def __init__(self, directory: Path) -> None:
        self.settings = WorkerSettings(num_gpu_blocks_override=2048, enable_prefix_caching=False)
        model = ModelSettings(model=str(directory), dtype="bfloat16")
        self.model: LoadedModel = build_runner(model, self.settings, lambda done, total: None)
        self.streams = 0

    def decode(self, prompts: list[list[int]], num_tokens: int, clock: Clock) -> float:
        """Seconds for `num_tokens` of each prompt, from the first output token on."""
        engine = Engine(self.model.runner, self.settings)
        sampling = SamplingParams(
            seed=0, max_tokens=num_tokens + 1, temperature=0.0, ignore_eos=True
        )
        requests = []
        for prompt in prompts:
            self.streams += 1
            key = StreamKey(GatewayId("bench"), self.streams, 0)
            request = Request(
                key, RequestId(f"r{self.streams}"), list(prompt), len(prompt), sampling
            )
            requests.append(request)
            engine.add(request)
        while any(request.num_known == request.num_prompt for request in requests):
            engine.step()
            engine.take_output()
        start = clock()
        first = sum(request.num_known - request.num_prompt for request in requests)
        while engine.has_work:
            engine.step()
            engine.take_output()
        done = len(requests) * (num_tokens + 1) - first
        return (clock() - start) * len(requests) * num_tokens / done


def generate(model: Any, prompts: list[list[int]], num_tokens: int, clock: Clock) -> float:
    """Seconds that transformers takes for `num_tokens` of each prompt after the first."""
    ids = torch.tensor(prompts)
    seconds = []
    for count in (1, num_tokens + 1):
        start = clock()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        seconds.append(clock() - start)
    return seconds[1] - seconds[0]


def main() -> None:
    """Print one line a batch size and, with --json, write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each stream")
    parser.add_argument("--rounds", type=int, default=3, help="the best round counts")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock: Clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder))
        bench = EngineBench(Path(folder))
    results = []
    for batch in arguments.batches:
        prompts = prompts_of(batch, arguments.prompt)
        ours, theirs = [], []
        for _ in range(arguments.rounds):
            ours.append(bench.decode(prompts, arguments.tokens, clock))
            theirs.append(generate(model, prompts, arguments.tokens, clock))
        total = batch * arguments.tokens
        engine, transformers = total / min(ours), total / min(theirs)
        results.append(
            {
                "batch": batch,
                "engine": engine,
                "transformers": transformers,
                "threads": arguments.threads,
            }
        )
        print(
            f"batch {batch}: engine {engine:.1f} tokens/s, transformers {transformers:.1f}, "
            f"ratio {engine / transformers:.2f} ({arguments.threads} threads, {arguments.clock})"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
