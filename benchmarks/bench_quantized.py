"""Weights rounded at load compared with plain ones, offline, on random weights in bfloat16.

    python -m benchmarks.bench_quantized --threads 2 --files Q8_0 Q4_K_M

Loads of one checkpoint take turns: `plain`, `int8`, `int4`, `fp8`. Output tokens per second after
the first token, bytes of all weights, and both as a ratio to `plain` of the same run. `--files`
adds GGUF files of the same weights, each also run by llama.cpp; it needs llama-cpp-python.
"""

import argparse
import gc
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, get_args
from unittest.mock import patch

import torch

from benchmarks.engine_loop import EngineLoop
from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.llama_library import FILE_TYPES, LlamaLibrary, quantize
from benchmarks.peers.sample import decode_rate
from benchmarks.random_model import SHAPES, random_prompts, write_checkpoint
from tokenmesh.engine.exec.resident import tensors_of
from tokenmesh.engine.exec.runner import TorchRunner
from tokenmesh.kernels.linear.formats.round import Rounding
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.gguf import unpack

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
    add("--files", choices=FILE_TYPES, nargs="*", default=[], help="types of GGUF files")
    add("--threads", type=int, default=2)
    add("--batches", type=int, nargs="+", default=[1, 8, 32])
    add("--prompt", type=int, default=32, help="prompt tokens before decoding")
    add("--tokens", type=int, default=16, help="output tokens of each stream")
    add("--rounds", type=int, default=2, help="the best round counts")
    return parser.parse_args(arguments)


def weight_bytes(loop: EngineLoop) -> int:
    """Sum the bytes of all tensors of the model, each once."""
    runner = loop.model.runner
    assert isinstance(runner, TorchRunner)
    # oneDNN's own layout has no address, and no views
    found = {
        id(each) if each.is_mkldnn else each.data_ptr(): each.nbytes
        for each in tensors_of(runner._model)
    }
    return sum(found.values())


def unpacked(source: Path, kind: str) -> tuple[Path, Path]:
    """A GGUF file of the weights in `source`'s, and the directory that our worker reads."""
    file = source.with_name(f"{kind}.gguf")
    quantize(source, file, kind)
    # the file has no vocabulary, which no run here needs
    with patch.object(unpack, "tokenizer_of", lambda file: ({}, {})):
        return file, unpack.unpacked(file, str(source.parent / "unpacked"))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    shape = SHAPES[options.model]
    settings = WorkerSettings(
        device="cpu", cpu_threads=options.threads, num_gpu_blocks_override=512
    )
    peers: dict[str, LlamaLibrary] = {}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "checkpoint"
        directory.mkdir()
        write_checkpoint(shape, directory)
        torch.manual_seed(0)
        loops = {
            name: EngineLoop(directory, settings, quantization=None if name == PLAIN else name)
            for name in options.forms
        }
        if options.files:
            write_gguf(directory, Path(folder) / "plain.gguf")
        for kind in options.files:
            file, made = unpacked(Path(folder) / "plain.gguf", kind)
            loops[kind] = EngineLoop(made, settings)
            peers[f"llama.cpp {kind}"] = LlamaLibrary(file, options.threads)
        gc.collect()
        sizes = {name: weight_bytes(loop) for name, loop in loops.items()}
        sizes |= {name: sizes[name.split()[1]] for name in peers}
        rates: dict[tuple[str, int], float] = {}
        for _ in range(options.rounds):
            for batch in options.batches:
                prompts = random_prompts(shape, batch, options.prompt)
                for name in sizes:
                    if name in peers:
                        times = peers[name].run(prompts, options.tokens)
                    else:
                        times = loops[name].run([(each, options.tokens) for each in prompts])
                    key = name, batch
                    rates[key] = max(rates.get(key, 0.0), decode_rate(times))
    report(options, sizes, rates)


def report(
    options: argparse.Namespace, sizes: dict[str, int], rates: dict[tuple[str, int], float]
) -> None:
    """A table of each form's bytes and rates, with ratios to the first form."""
    first = options.forms[0]
    for name in sizes:
        cells = [f"{sizes[name] / (1 << 20):7.0f} MiB ({sizes[name] / sizes[first]:.2f})"]
        for batch in options.batches:
            rate = rates[name, batch]
            cells.append(f"{batch:3} streams {rate:7.1f} tok/s ({rate / rates[first, batch]:.2f})")
        sys.stdout.write(f"{name:16} {'  '.join(cells)}\n")


if __name__ == "__main__":
    main()
