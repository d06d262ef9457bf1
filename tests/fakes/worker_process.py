"""A worker as a process of its own: a test may kill it, and hold its reads of adapters."""

import json
import os
import sys
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.fakes.small_mesh import SmallMesh
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.loader import plain_values
from tokenmesh.shared.ids import InstanceId

_START_S = 40.0
"""Imports alone take a busy machine half of it."""
_FORKS = get_context("forkserver")
_FORKS.set_forkserver_preload(
    [__name__, "tokenmesh.cli.main", "tokenmesh.cli.serve", "tokenmesh.services.worker_svc.main"]
)


class WorkerProcess:
    """Use `worker_process`."""

    def __init__(self, process: ForkServerProcess, folder: Path) -> None:
        self._process = process
        self._folder = folder

    @property
    def is_reading(self) -> bool:
        """Return whether it has begun to read an adapter while reads are held."""
        return (self._folder / f"reading-{self._process.pid}").exists()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.join()


@asynccontextmanager
async def worker_process(folder: Path, settings: Settings) -> AsyncIterator[WorkerProcess]:
    """A process that starts; the mesh has it as soon as its heartbeats arrive.

    It reads no adapter while the file `hold` is in the folder.
    """
    config = folder / "worker.json"
    config.write_text(json.dumps(plain_values(settings)))
    process = _FORKS.Process(target=_serve, args=(config, folder), daemon=True)
    process.start()
    worker = WorkerProcess(process, folder)
    try:
        yield worker
    finally:
        worker.kill()


async def joined(mesh: SmallMesh, before: Collection[InstanceId] = ()) -> list[InstanceId]:
    """The workers in processes of their own, without those that were there `before`."""
    known = {*before, *(each.instance_id for each in mesh.workers)}

    def new() -> list[InstanceId]:
        members = mesh.gateway.members.workers(mesh.model)
        found = [InstanceId(each.beat.instance_id) for each in members]
        return [each for each in found if each not in known]

    await mesh.until(lambda: bool(new()), _START_S)
    return new()


def _serve(config: Path, folder: Path) -> None:
    from tokenmesh.cli.main import main
    from tokenmesh.engine.adapters.adapter import ReadAdapter, SimAdapters

    read, number = SimAdapters.read, os.getpid()

    def read_held(self: SimAdapters, directory: Path) -> ReadAdapter:
        while (folder / "hold").exists():
            (folder / f"reading-{number}").touch()
            time.sleep(0.01)
        return read(self, directory)

    SimAdapters.read = read_held  # type: ignore[method-assign]
    sys.argv = ["tokenmesh", "serve", "worker", "--config", str(config)]
    main()
