"""Assigns a GPU to each process of an embedded mesh that needs one: workers and encoders."""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Final

from tokenmesh.shared.config import Settings

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_DEVICES: Final = Path("/dev")
_GPU: Final = re.compile(r"nvidia[0-9]+")


def visible_gpus(
    devices: Path = _DEVICES, environment: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """The GPUs as CUDA_VISIBLE_DEVICES names them: by its own entries, or by their indexes.

    `devices` is where the driver has a file for each GPU of this machine or container.
    """
    given = environment.get(VISIBLE)
    if given is None:
        # torch would find them too, but importing it takes seconds.
        count = sum(_GPU.fullmatch(path.name) is not None for path in devices.iterdir())
        return tuple(map(str, range(count)))
    found: list[str] = []
    for entry in map(str.strip, given.split(",")):
        # As in CUDA, an entry that names no device hides those behind it.
        if not entry or entry.startswith("-"):
            break
        found.append(entry)
    return tuple(found)


def assign_gpus(
    settings: Settings, num_workers: int, gpus: Sequence[str]
) -> dict[str, list[dict[str, str]]]:
    """Return additions to the environment of each process, by service.

    Each process has a GPU of its own while there are enough, workers first; then they take turns.
    With fewer than two GPUs there is nothing to choose.
    """
    turns = cycle(gpus)
    processes = (
        ("worker", settings.worker.device, num_workers),
        ("encoder", settings.encoder.device, settings.up.encoders),
    )
    return {
        service: [
            {VISIBLE: next(turns)} if device != "cpu" and len(gpus) > 1 else {}
            for _ in range(count)
        ]
        for service, device, count in processes
    }


def overfull(settings: Settings, num_awake: int, gpus: Sequence[str]) -> str | None:
    """Warn where `num_awake` workers that compute at a time want more memory than there is."""
    worker = settings.worker
    if not gpus or worker.device == "cpu" or worker.engine == "sim":
        return None
    most = -(-num_awake // len(gpus))
    if most == 1 or most * worker.gpu_memory_utilization <= 1:
        return None
    return (
        f"{most} workers share a GPU (of {len(gpus)}), and each takes "
        f"{worker.gpu_memory_utilization:g} of it: --gpu-memory-utilization {0.9 / most:.2f} fits"
    )
