"""A gateway as a process of its own, which a test may kill or stop."""

import asyncio
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import httpx

from tests.fakes.response_client import ResponseClient
from tests.servers import free_port
from tokenmesh.shared import clock
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.loader import changed, plain_values
from tokenmesh.shared.ids import ModelName

_PATIENCE_S = 40.0
"""Imports alone take a busy machine half of it."""
_FORKS = get_context("forkserver")
_FORKS.set_forkserver_preload(
    [__name__, "tokenmesh.cli.main", "tokenmesh.cli.serve", "tokenmesh.services.gateway.main"]
)


class GatewayProcess:
    """Use `gateway_process`."""

    def __init__(self, process: ForkServerProcess, client: ResponseClient) -> None:
        self._process = process
        self.client = client

    async def kill(self) -> None:
        """As the kernel does when memory runs out."""
        self._process.kill()
        await self.wait()

    def terminate(self) -> None:
        """As a supervisor does that wants it to leave."""
        self._process.terminate()

    async def wait(self) -> int | None:
        """Its exit code."""
        await asyncio.to_thread(self._process.join)
        return self._process.exitcode

    def stop(self) -> None:
        """It stands still, and does not know."""
        self._send(signal.SIGSTOP)

    def wake(self) -> None:
        """It goes on as if nothing had been."""
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


@asynccontextmanager
async def gateway_process(
    folder: Path,
    settings: Settings,
    model: ModelName,
    *,
    clock_ahead_s: float = 0.0,
    clock_set_by: Path | None = None,
) -> AsyncIterator[GatewayProcess]:
    """One more gateway of a mesh, ready; its wall clock may be wrong, or become so with a file.

    It is forked from a process that has imported everything already.
    """
    port = free_port()
    config = folder / f"gateway-{port}.json"
    own = changed(settings, {"gateway": {"port": port}})
    config.write_text(json.dumps(plain_values(own)))
    arguments = (config, clock_ahead_s, clock_set_by or folder)
    process = _FORKS.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=_PATIENCE_S) as http:
        gateway = GatewayProcess(process, ResponseClient(http, model))
        try:
            await _wait_ready(http)
            yield gateway
        finally:
            if process.is_alive():
                gateway.wake()
                await gateway.kill()


def _serve(config: Path, ahead_s: float, since: Path) -> None:
    """Be a gateway whose wall clock is wrong as soon as a file exists."""
    from tokenmesh.cli.main import main

    right = time.time
    time.time = lambda: right() + (ahead_s if since.exists() else 0.0)
    importlib.reload(clock)  # it takes the time of its import for the process's start
    sys.argv = ["tokenmesh", "serve", "gateway", "--config", str(config)]
    main()


async def _wait_ready(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            try:
                if (await http.get("/readyz")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)
