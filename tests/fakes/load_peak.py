"""Loads a checkpoint, or one rank's part of it, and prints the most memory that loading took.

python -m tests.fakes.load_peak SMALL DIRECTORY WORLD
"""

import sys
from pathlib import Path

import torch

from benchmarks.bench_ranks import NoGroup
from tokenmesh.engine.exec.build import build_runner
from tokenmesh.engine.exec.loaded_model import RunnableModel
from tokenmesh.engine.exec.role import ALONE_ROLE, Role
from tokenmesh.engine.ranks.ranks import Ranks
from tokenmesh.shared.allocator import trim_heap
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings


def memory(key: str) -> int:
    """Kilobytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def load(directory: str, world: int) -> RunnableModel:
    worker = WorkerSettings(device="cpu", cpu_threads=1, num_gpu_blocks_override=32)
    role = ALONE_ROLE if world == 1 else Role(Ranks(0, world, NoGroup()), world)
    model = ModelSettings(model=directory, dtype="bfloat16")
    return build_runner(model, worker, lambda done, total: None, role)


def main() -> None:
    _, small, directory, world = sys.argv
    torch.set_num_threads(1)
    load(small, 1)  # what code and libraries take is not the model's
    trim_heap()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    loaded = load(directory, int(world))
    print(1024 * (memory("VmHWM") - before), loaded.times.num_bytes, flush=True)


if __name__ == "__main__":
    main()
