"""Time to ready of one worker, by stage, compared with a plain read of the same files.

    python -m benchmarks.bench_startup --shape qwen2.5-0.5b --out benchmarks/results/startup.json
    python -m benchmarks.bench_startup --up model.gguf

Each round is a process of its own: start and imports, reading the weights, packing them, the KV
pool, the first token. The files are in the page cache, for us as for the plain read before and
after each round; the better of those two counts. The round with the shortest way to the first token
is reported. With --up, a whole mesh instead: its time to ready, and its memory by process.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.random_model import SHAPES, write_checkpoint
from benchmarks.up_memory import main_up
from tokenmesh.shared.config.model import Dtype

PROMPT_TOKENS: Final = 16
_READ_BYTES: Final = 64 << 20


class Stages(msgspec.Struct):
    """One start, seconds."""

    import_s: float
    """From the start of the process until the worker's modules are there."""
    read_s: float
    pack_s: float
    """Converting, merging and packing weights."""
    pool_s: float
    """Measuring memory and making the KV pool."""
    other_s: float
    """Config files, C kernels, rows, sampler."""
    first_token_s: float
    ready_s: float
    """All of it."""
    num_bytes: int
    """Bytes of weights."""
    plain_read_s: float = 0.0
    """The same files read into one buffer and forgotten."""

    @property
    def load_ratio(self) -> float:
        """Reading and packing in plain reads."""
        return (self.read_s + self.pack_s) / self.plain_read_s

    @property
    def read_ratio(self) -> float:
        """Reading alone in plain reads."""
        return self.read_s / self.plain_read_s


class StartupResult(msgspec.Struct):
    """A run of bench_startup."""

    config: dict[str, object]
    environment: dict[str, object]
    load_average_end: float
    stages: Stages


def start(directory: Path, began_s: float, dtype: Dtype) -> Stages:
    """Start a worker up to its first token; `began_s` is wall time."""
    # imported here: their time is one of the stages
    from benchmarks.engine_loop import EngineLoop
    from tokenmesh.shared.config.worker import WorkerSettings

    import_s = time.time() - began_s
    loop = EngineLoop(directory, WorkerSettings(), dtype)
    loaded_s = time.time() - began_s
    loop.run([(list(range(3, 3 + PROMPT_TOKENS)), 1)])
    ready_s = time.time() - began_s
    times, pool_s = loop.model.times, loop.model.pool_s
    return Stages(
        import_s=import_s,
        read_s=times.read_s,
        pack_s=times.pack_s,
        pool_s=pool_s,
        other_s=loaded_s - import_s - times.read_s - times.pack_s - pool_s,
        first_token_s=ready_s - loaded_s,
        ready_s=ready_s,
        num_bytes=times.num_bytes,
    )


def plain_read_s(directory: Path) -> float:
    """Seconds to read every weight file once."""
    buffer = memoryview(bytearray(_READ_BYTES))
    began_s = time.perf_counter()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began_s


def measure(directory: Path, rounds: int, dtype: str) -> Stages:
    """The best of several starts."""
    found = []
    for _ in range(rounds):
        before_s = plain_read_s(directory)
        command = [sys.executable, "-m", "benchmarks.bench_startup", "--child", str(directory)]
        command += ["--dtype", dtype, "--began", repr(time.time())]
        # its output stays for reading after a failure
        child = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        stages = msgspec.json.decode(child.stdout, type=Stages)
        stages.plain_read_s = min(before_s, plain_read_s(directory))
        found.append(stages)
    return min(found, key=lambda stages: stages.ready_s)


def report(stages: Stages) -> str:
    """The table that is printed."""
    lines = [
        f"{name:<12} {getattr(stages, f'{name}_s'):8.2f} s"
        for name in ("import", "read", "pack", "pool", "other", "first_token", "ready")
    ]
    gb = stages.num_bytes / 1e9
    lines.append(
        f"{gb:.2f} GB: read at {gb / max(stages.read_s, 1e-9):.1f} GB/s, plain read "
        f"{gb / stages.plain_read_s:.1f} GB/s; reading {stages.read_ratio:.2f} and loading "
        f"{stages.load_ratio:.2f} times a plain read"
    )
    return "\n".join(lines)


def write(path: Path, stages: Stages, config: dict[str, object]) -> None:
    """Keep the numbers with where and when they were measured."""
    from benchmarks.serve.results import environment, write_json

    write_json(path, StartupResult(config, dict(environment()), os.getloadavg()[0], stages))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the stages and, with --out, write them."""
    parser = argparse.ArgumentParser(description=__doc__, prog="bench_startup")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--model", type=Path, help="a checkpoint instead of random weights")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--up", metavar="MODEL", help="`tokenmesh up` of a model, and its memory")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        stages = start(options.child, options.began, options.dtype)
        sys.stdout.write(msgspec.json.encode(stages).decode())
        return 0
    if options.up is not None:
        return main_up(options.up, options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        directory = options.model or Path(folder)
        if options.model is None:
            write_checkpoint(SHAPES[options.shape], directory)
        stages = measure(directory, options.rounds, options.dtype)
    print(report(stages))
    if options.out is not None:
        name = options.model.name if options.model else options.shape
        write(
            options.out, stages, {"model": name, "dtype": options.dtype, "rounds": options.rounds}
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
