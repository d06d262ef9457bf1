"""The engine on one GPU against the numbers that it was designed for, on random weights.

    python -m benchmarks.gpu_bars --bars nano decode prefill --out bars.json
    python -m benchmarks.gpu_bars --tiny --out bars.json

`nano` and `idle` run the Qwen3-0.6B shape, `decode` and `prefill` the Llama-3.1-8B shape, in
bfloat16; `int4` runs the latter with weights that are rounded when they are loaded. The file is
written after each group of bars. `--tiny` measures the same on a CPU in seconds, on a model of two
layers: it proves that the benchmark runs, and its bars are not met.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.engine_loop import EngineLoop
from benchmarks.nano_workload import REQUESTS, TEMPERATURE, nano_asks
from benchmarks.peers.sample import decode_rate
from benchmarks.random_model import SHAPES, ModelShape, random_prompts
from benchmarks.random_weights import write_weights
from benchmarks.serve.results import write_json
from tokenmesh.shared.config.model import QuantizationName
from tokenmesh.shared.config.worker import WorkerSettings

_TINY: Final = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


class Bar(msgspec.Struct):
    """One number and what it should be."""

    name: str
    unit: str
    measured: float
    least: float | None = None
    most: float | None = None

    @property
    def is_met(self) -> bool:
        """True where the number is within its bounds."""
        above = self.least is None or self.measured >= self.least
        return above and (self.most is None or self.measured <= self.most)


class Bars(msgspec.Struct):
    """A run."""

    device: str
    is_tiny: bool
    bars: list[Bar]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="gpu_bars", formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bars", nargs="+", choices=sorted(_GROUPS), default=list(_GROUPS))
    parser.add_argument("--tiny", action="store_true", help="two layers, few tokens, any device")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


def _shape_of(model: str, tiny: bool) -> ModelShape:
    shape = SHAPES[model]
    return replace(shape, config={**shape.config, **_TINY}) if tiny else shape


def _load(shape: ModelShape, tiny: bool, quantization: QuantizationName | None) -> EngineLoop:
    """An engine on random weights, its kernels compiled."""
    settings: dict[str, Any] = {"max_num_seqs": REQUESTS, "enable_prefix_caching": False}
    if tiny:
        settings["num_gpu_blocks_override"] = 256
    with tempfile.TemporaryDirectory() as folder:
        write_weights(shape, Path(folder))
        worker = WorkerSettings.model_validate(settings)
        loop = EngineLoop(Path(folder), worker, quantization=quantization)
    loop.run([(list(range(3, 19)), 4)])
    return loop


def nano(loop: EngineLoop, shape: ModelShape, tiny: bool) -> list[Bar]:
    """nano-vllm's requests, prefill included."""
    asks = nano_asks(REQUESTS)
    if tiny:
        asks = [([each % shape.vocab_size for each in ids[:9]], 3) for ids, _ in asks[:3]]
    began_s = time.perf_counter()
    loop.run(asks, temperature=TEMPERATURE)
    rate = sum(count for _, count in asks) / (time.perf_counter() - began_s)
    return [Bar("nano-vllm's 256 requests, 0.6B", "output tokens/s", rate, least=20_000)]


def decode(loop: EngineLoop, shape: ModelShape, tiny: bool) -> list[Bar]:
    """Steady decoding at several batch sizes, 1,024 tokens of context."""
    bars = []
    for rows, least in ((1, 210.0), (64, 8_000.0), (256, 14_000.0)):
        prompts = random_prompts(shape, min(rows, 3) if tiny else rows, 9 if tiny else 1024)
        asks = [(prompt, 4 if tiny else 129) for prompt in prompts]
        rate = decode_rate(loop.run(asks))
        bars.append(Bar(f"decode, 8B, batch {rows}", "output tokens/s", rate, least=least))
    times = loop.run(asks, time.process_time)
    last = max(each[0] for each in times)
    steps = sum(1 for each in times[0] if each > last)
    spent_ms = 1e3 * (times[0][-1] - last) / max(1, steps)
    bars.append(Bar("processor time of a step, batch 256", "ms", spent_ms, most=0.35))
    return bars


def prefill(loop: EngineLoop, shape: ModelShape, tiny: bool) -> list[Bar]:
    """Prompts of 2,048 tokens, one token drawn of each."""
    prompts = random_prompts(shape, 2 if tiny else 16, 9 if tiny else 2048)
    began_s = time.perf_counter()
    loop.run([(prompt, 1) for prompt in prompts])
    rate = sum(map(len, prompts)) / (time.perf_counter() - began_s)
    return [Bar("prefill, 8B", "prompt tokens/s", rate, least=22_000)]


def idle(loop: EngineLoop, shape: ModelShape, tiny: bool) -> list[Bar]:
    """Measure the share of steady decoding in which the device runs no kernel."""
    prompts = random_prompts(shape, 2 if tiny else REQUESTS, 9 if tiny else 128)
    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[activity]) as recorded:
        loop.run([(prompt, 4 if tiny else 65) for prompt in prompts])
    kind = "CUDA" if torch.cuda.is_available() else "CPU"
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in recorded.events() or ()
        if event.device_type.name == kind
    )
    share = idle_share(spans[len(spans) // 2 :])
    return [Bar("idle share of the device, 0.6B, batch 256", "", share, most=0.03)]


def idle_share(spans: Sequence[tuple[float, float]]) -> float:
    """Return the idle share between the first start and the last end; spans by start."""
    if not spans:
        return 1.0
    busy, until = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    whole = until - spans[0][0]
    return 1.0 - busy / whole if whole else 0.0


def int4(loop: EngineLoop, shape: ModelShape, tiny: bool) -> list[Bar]:
    """Steady decoding of weights in INT4, which take a third of the memory to read."""
    bars = []
    for rows, least in ((1, 420.0), (64, 8_000.0)):
        prompts = random_prompts(shape, min(rows, 3) if tiny else rows, 9 if tiny else 128)
        rate = decode_rate(loop.run([(prompt, 4 if tiny else 129) for prompt in prompts]))
        bars.append(Bar(f"decode, 8B in INT4, batch {rows}", "output tokens/s", rate, least=least))
    return bars


Measure = Callable[[EngineLoop, ModelShape, bool], list[Bar]]

_GROUPS: Final[dict[str, tuple[str, QuantizationName | None, Measure]]] = {
    "nano": ("qwen3-0.6b", None, nano),
    "idle": ("qwen3-0.6b", None, idle),
    "decode": ("llama-3.1-8b", None, decode),
    "prefill": ("llama-3.1-8b", None, prefill),
    "int4": ("llama-3.1-8b", "int4", int4),
}
"""Shape, and what its weights are rounded to. Those of one model stand together: it is loaded once.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and save; 1 when a bar is not met."""
    options = parse(arguments)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found = Bars(device, options.tiny, [])
    for (model, quantization), names in groupby(options.bars, lambda name: _GROUPS[name][:2]):
        shape = _shape_of(model, options.tiny)
        loop = _load(shape, options.tiny, quantization)
        for name in names:
            for bar in _GROUPS[name][2](loop, shape, options.tiny):
                found.bars.append(bar)
                print(f"{bar.name}: {bar.measured:.4g} {bar.unit}", flush=True)
            write_json(options.out, found)
        # the next model takes what it finds free
        del loop
        gc.collect()
        torch.cuda.empty_cache()
    return 0 if options.tiny or all(bar.is_met for bar in found.bars) else 1


if __name__ == "__main__":
    sys.exit(main())
