"""A gateway as a process of its own, which a test may kill or stop."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from tests.fakes.response_client import ResponseClient
from tests.servers import free_port
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.loader import changed, plain_values
from tokenmesh.shared.ids import ModelName

_PATIENCE_S = 40.0
"""Imports alone take a busy machine half of it."""
_PROGRAM = """
import os, time
right = time.time
time.time = lambda: right() + ({ahead_s} if os.path.exists({since!r}) else 0.0)
from tokenmesh.cli.main import main
main()
"""


class GatewayProcess:
    """Use `gateway_process`."""

    def __init__(self, process: asyncio.subprocess.Process, client: ResponseClient) -> None:
        self.process = process
        self.client = client

    async def kill(self) -> None:
        """As the kernel does when memory runs out."""
        self.process.kill()
        await self.process.wait()

    def stop(self) -> None:
        """It stands still, and does not know."""
        self.process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        """It goes on as if nothing had been."""
        self.process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def gateway_process(
    folder: Path,
    settings: Settings,
    model: ModelName,
    *,
    clock_ahead_s: float = 0.0,
    clock_set_by: Path | None = None,
) -> AsyncIterator[GatewayProcess]:
    """One more gateway of a mesh, ready; its wall clock may be wrong, or become so with a file."""
    port = free_port()
    config = folder / f"gateway-{port}.json"
    own = changed(settings, {"gateway": {"port": port}})
    config.write_text(json.dumps(plain_values(own)))
    program = _PROGRAM.format(ahead_s=clock_ahead_s, since=str(clock_set_by or folder))
    command = ("-P", "-c", program, "serve", "gateway", "--config", str(config))
    process = await asyncio.create_subprocess_exec(sys.executable, *command)
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S) as http:
        try:
            await _wait_ready(http)
            yield GatewayProcess(process, ResponseClient(http, model))
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                await process.wait()


async def _wait_ready(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            try:
                if (await http.get("/readyz")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)
