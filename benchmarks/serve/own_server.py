"""A server of the benchmark's own on a free port, ended afterwards."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tokenmesh.cli.bench.client import Target
from tokenmesh.cli.embedded.ports import free_port
from tokenmesh.shared.parent_death import dies_with_parent

READY_S = 300.0
_LEAVE_S = 30.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class OwnServer:
    """A server that is ready."""

    url: str
    pid: int
    """Also its process group's."""


@asynccontextmanager
async def own_server(
    command: Sequence[str],
    ready_path: str,
    environment: Mapping[str, str],
    log: Path,
    ready_s: float = READY_S,
    scheme: str = "http",
) -> AsyncIterator[OwnServer]:
    """Run `command --port N` until `ready_path` answers 200, then yield it; it writes to `log`.

    Raises RuntimeError with the end of the log when it ends instead, TimeoutError after `ready_s`.
    """
    port = free_port()
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            "--port",
            str(port),
            env=dict(environment),
            stdout=output,
            stderr=output,
            process_group=0,
            preexec_fn=dies_with_parent(),
        )
    url = f"{scheme}://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(ready_s):
            is_ready = await _is_ready(Target(url, None), ready_path, process)
        if not is_ready:
            raise RuntimeError(f"{log.stem} did not start:\n{tail(log)}")
        yield OwnServer(url, process.pid)
    finally:
        await end_group(process, signal.SIGTERM, _LEAVE_S)


async def end_group(
    process: asyncio.subprocess.Process, sign: signal.Signals, leave_s: float
) -> None:
    """Ask a process group of ours to leave, frozen or not; after `leave_s` it is killed."""
    if process.returncode is not None:
        return
    process.send_signal(sign)
    with suppress(ProcessLookupError):  # it has just ended
        os.killpg(process.pid, signal.SIGCONT)
    try:
        await asyncio.wait_for(process.wait(), leave_s)
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _is_ready(server: Target, path: str, process: asyncio.subprocess.Process) -> bool:
    while process.returncode is None:
        try:
            await server.fetch("GET", path)
        except (OSError, ValueError):
            await asyncio.sleep(_POLL_S)
        else:
            return True
    return False


def tail(log: Path) -> str:
    """The end of a log, for an error message."""
    return log.read_text(encoding="utf-8", errors="replace")[-2000:]
