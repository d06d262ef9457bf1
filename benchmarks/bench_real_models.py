"""Files of real models in our engine and in llama.cpp, in turns, both without HTTP.

    python -m benchmarks.bench_real_models FILE.gguf --llama-python ~/llama/bin/python

Of each file: seconds to load it in a new process, prompt tokens a second, time to first token,
output tokens a second of some streams. The one that waits is stopped: llama.cpp's threads spin.
`--bytes` of Python's manual are scored as well: perplexity by default and in float32, and
llama.cpp's. `--out` adds lines to those in the file, so that each file can be measured by itself.
`--copies` adds the same model in other types of blocks.
"""

import argparse
import asyncio
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from benchmarks.peers.child import Child, start_child
from benchmarks.serve.results import environment, write_json
from tokenmesh.shared.gguf.unpack import unpacked
from tokenmesh.shared.messages.sampling import SamplingParams

_WINDOW: Final = 1024
_SCORED: Final = SamplingParams(seed=0, max_tokens=1, temperature=0.0, prompt_logprobs=1)
_TIMEOUT_S: Final = 1200.0
_DECODE_PROMPT: Final = 32
_SHORT: Final = 2048
"""Prompts that are longer have one round."""
OURS, LLAMA = "TokenMesh", "llama.cpp"


class Side(msgspec.Struct):
    """One engine on one file; the best of all rounds."""

    load_s: float = 0.0
    """From the start of its process."""
    prompt_rates: dict[int, float] = {}
    """Tokens a second by the prompt's length."""
    ttft_ms: float = 0.0
    """Time to the first token of the shortest prompt."""
    decode_rates: dict[int, float] = {}
    """Output tokens a second after the first token, by the number of streams."""
    perplexity: float | None = None


class ModelLine(msgspec.Struct):
    """One file."""

    name: str
    num_bytes: int
    sides: dict[str, Side]
    exact_perplexity: float | None = None
    """With float32 activations."""


class RealModelsResult(msgspec.Struct):
    """All files that were measured into one file of results."""

    config: dict[str, Any]
    environment: dict[str, Any]
    load_average_end: float
    lines: list[ModelLine]


class Scores(msgspec.Struct):
    """llama.cpp's answer to windows."""

    logprobs: list[list[float]]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        prog="bench_real_models",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("files", type=Path, nargs="+")
    add("--copies", nargs="*", default=[], metavar="TYPE", help="of each file, as Q8_0 and BF16")
    add("--only-copies", action="store_true", help="leave out the files themselves")
    add("--llama-python", type=Path, help="an interpreter with llama-cpp-python")
    add("--threads", type=int, default=2)
    add("--prompts", type=int, nargs="*", default=[128, 1024, 4096], help="lengths, in tokens")
    add("--streams", type=int, nargs="*", default=[1, 8, 32])
    add("--tokens", type=int, default=32, help="output tokens of each stream")
    add("--rounds", type=int, default=2, help="the best round counts")
    add("--bytes", type=int, default=0, help="of text to score")
    add("--out", type=Path)
    return parser.parse_args(arguments)


async def started(
    side: str, file: Path, options: argparse.Namespace, stack: AsyncExitStack
) -> tuple[Child, float]:
    """A child with the loaded file, stopped, and the seconds that this took."""
    module = "engine_child" if side == OURS else "llama_child"
    python = sys.executable if side == OURS else options.llama_python
    began_s = time.perf_counter()
    child = await stack.enter_async_context(
        start_child(
            f"benchmarks.peers.{module}",
            [str(file), str(options.threads)],
            {**os.environ, "PYTHONPATH": os.getcwd()},
            Path(tempfile.gettempdir()) / f"{module}.log",
            _TIMEOUT_S,
            python,
        )
    )
    return child, time.perf_counter() - began_s


async def measure(file: Path, options: argparse.Namespace, ids: list[int]) -> dict[str, Side]:
    """Measure both engines in turns; prompts are parts of `ids`."""
    names = [OURS, *([LLAMA] if options.llama_python else [])]
    sides = {name: Side() for name in names}
    async with AsyncExitStack() as stack:
        children = {}
        for name in names:
            # the second load finds the file in memory and what the first has prepared
            async with AsyncExitStack() as first:
                await started(name, file, options, first)
            children[name], sides[name].load_s = await started(name, file, options, stack)
        for number in range(options.rounds):
            order = names if number % 2 == 0 else names[::-1]
            for length in options.prompts:
                if number and length > _SHORT:
                    continue
                for name in order:
                    sample = await children[name].measure([ids[:length]], 1)
                    rate = length / sample.ttft_p50_ms * 1e3
                    rates = sides[name].prompt_rates
                    rates[length] = max(rates.get(length, 0.0), rate)
            for count in options.streams:
                parts = [ids[64 * i : 64 * i + _DECODE_PROMPT] for i in range(count)]
                for name in order:
                    sample = await children[name].measure(parts, options.tokens)
                    rates = sides[name].decode_rates
                    rates[count] = max(rates.get(count, 0.0), sample.decode_tokens_per_s)
        if options.bytes and LLAMA in children:
            os.killpg(children[LLAMA]._process.pid, 18)
            asked = {"windows": windows(ids)}
            sides[LLAMA].perplexity = perplexity(
                (await children[LLAMA].ask(asked, Scores)).logprobs
            )
    for side in sides.values():
        if options.prompts:
            shortest = options.prompts[0]
            side.ttft_ms = shortest / side.prompt_rates[shortest] * 1e3
    return sides


def windows(ids: list[int]) -> list[list[int]]:
    """Parts of the text that are scored by themselves."""
    return [ids[i : i + _WINDOW] for i in range(0, len(ids), _WINDOW)]


def perplexity(rows: list[list[float]]) -> float:
    """The perplexity that log probabilities amount to."""
    return math.exp(-math.fsum(map(math.fsum, rows)) / sum(map(len, rows)))


def our_perplexity(file: Path, dtype: str, options: argparse.Namespace, ids: list[int]) -> float:
    """The perplexity of our engine, which runs in this process."""
    from tests.fakes.engine_driver import EngineDriver, Job

    settings: dict[str, Any] = {"cpu_threads": options.threads, "num_gpu_blocks_override": 2200}
    engine = EngineDriver(file, dtype=dtype, max_model_len=2 * _WINDOW, **settings)  # type: ignore[arg-type]
    found = []
    for outcome in engine.run([Job(each, _SCORED) for each in windows(ids)]):
        assert outcome.prompt_logprobs is not None, outcome.error
        found.append([row.logprob for row in outcome.prompt_logprobs if row is not None])
    return perplexity(found)


def line_of(file: Path, name: str, options: argparse.Namespace) -> ModelLine:
    """Measure one file."""
    from tests.real.texts import prose

    tokenizer = Tokenizer.from_file(str(unpacked(file) / "tokenizer.json"))
    ids = tokenizer.encode(prose(options.bytes or 40_000)).ids
    sides = asyncio.run(measure(file, options, ids))
    line = ModelLine(name, file.stat().st_size, sides)
    if options.bytes:
        line.exact_perplexity = our_perplexity(file, "float32", options, ids)
        sides[OURS].perplexity = our_perplexity(file, "auto", options, ids)
    return line


def describe(line: ModelLine) -> str:
    """Some lines of text."""
    text = [f"{line.name}, {line.num_bytes / 1e6:.0f} MB"]
    for name, side in line.sides.items():
        rates = [f"{length}: {rate:,.0f}" for length, rate in side.prompt_rates.items()]
        streams = [f"{count}: {rate:,.1f}" for count, rate in side.decode_rates.items()]
        text.append(
            f"  {name:10} ready {side.load_s:.2f} s, prompt tokens/s {', '.join(rates)}; first "
            f"token {side.ttft_ms:.1f} ms; tokens/s of streams {', '.join(streams)}"
        )
        if side.perplexity is not None and line.exact_perplexity:
            above = side.perplexity / line.exact_perplexity - 1
            text.append(f"  {'':10} perplexity {side.perplexity:.3f} ({above:+.3%})")
    return "\n".join(text)


def write(path: Path, lines: list[ModelLine], options: argparse.Namespace) -> None:
    """Add the lines to those of other files, or what was scored to a line of the same file."""
    kept: dict[str, ModelLine] = {}
    if path.exists():
        old = msgspec.json.decode(path.read_bytes(), type=RealModelsResult)
        kept = {line.name: line for line in old.lines}
    for line in lines:
        before = kept.setdefault(line.name, line)
        for name, side in line.sides.items():
            speeds = side if side.decode_rates else before.sides.get(name, side)
            scored = side if side.perplexity is not None else before.sides.get(name, side)
            before.sides[name] = msgspec.structs.replace(speeds, perplexity=scored.perplexity)
        before.exact_perplexity = line.exact_perplexity or before.exact_perplexity
    config = {key: value for key, value in vars(options).items() if key in ("threads", "tokens")}
    result = RealModelsResult(config, dict(environment()), os.getloadavg()[0], [*kept.values()])
    write_json(path, result)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save."""
    options = parse(arguments)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for file in options.files:
            cases = [] if options.only_copies else [(file, file.stem)]
            for kind in options.copies:
                from tests.real.reference import copy_as

                name = f"{file.stem} as {kind}"
                cases.append((copy_as(file, kind, Path(folder) / f"{name}.gguf"), name))
            for path, name in cases:
                lines.append(line_of(path, name, options))
                sys.stdout.write(describe(lines[-1]) + "\n")
                sys.stdout.flush()
    if options.out:
        write(options.out, lines, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
