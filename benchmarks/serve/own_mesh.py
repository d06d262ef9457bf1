"""A mesh of the benchmark's own: `tokenmesh up` on a free port, ended afterwards."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.serve.client import Server

_READY_S = 300.0
_LEAVE_S = 30.0
_POLL_S = 0.2


@asynccontextmanager
async def own_mesh(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> AsyncIterator[str]:
    """Its base URL, once it is ready; what it writes goes to `log`. Raises RuntimeError."""
    port = _free_port()
    command = [sys.executable, "-m", "tokenmesh", "up", *arguments, "--port", str(port)]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, **environment}, stdout=output, stderr=output
        )
    url = f"http://127.0.0.1:{port}"
    try:
        await _until_ready(Server(url, None), process, log)
        yield url
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            await asyncio.wait_for(process.wait(), _LEAVE_S)


async def _until_ready(server: Server, process: asyncio.subprocess.Process, log: Path) -> None:
    give_up_s = time.perf_counter() + _READY_S
    while time.perf_counter() < give_up_s:
        if process.returncode is not None:
            break
        try:
            await server.ask("GET", "/readyz")
        except (OSError, ValueError):
            await asyncio.sleep(_POLL_S)
        else:
            return
    raise RuntimeError(f"the mesh did not start:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-2000:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
