"""NVIDIA Dynamo on this machine: its frontend and its mocker, found through files."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.serve.own_server import READY_S, end_group, tail
from tokenmesh.cli.bench.client import Target
from tokenmesh.cli.embedded.ports import free_port
from tokenmesh.shared.parent_death import dies_with_parent

DYNAMO: Final = "dynamo"
_POLL_S: Final = 0.2
_LEAVE_S: Final = 10.0


@asynccontextmanager
async def open_dynamo(
    python: Path, checkpoint: Path, model: str, preload: Path | None, folder: Path
) -> AsyncIterator[tuple[str, list[int]]]:
    """URL and pids. `preload`: a library for the frontend. Raises RuntimeError."""
    port = free_port()
    chosen = {
        **os.environ,
        "DYN_FILE_KV": str(folder / "dynamo"),
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_LOG": "warn",
        "HF_HUB_OFFLINE": "1",
    }
    chosen.pop("PYTHONPATH", None)
    shim = {"LD_PRELOAD": str(preload)} if preload is not None else {}
    frontend = ["dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    frontend += ["--router-mode", "round-robin"]
    mocker = ["dynamo.mocker", "--model-path", str(checkpoint), "--model-name", model]
    mocker += ["--speedup-ratio", "1000000", "--num-workers", "1"]
    async with AsyncExitStack() as stack:
        pids = []
        for command, environment in ((frontend, {**chosen, **shim}), (mocker, chosen)):
            log = stack.enter_context((folder / f"{command[0]}.log").open("wb"))
            process = await asyncio.create_subprocess_exec(
                str(python),
                "-m",
                *command,
                env=environment,
                stdout=log,
                stderr=log,
                process_group=0,
                preexec_fn=dies_with_parent(),
            )
            stack.push_async_callback(end_group, process, signal.SIGTERM, _LEAVE_S)
            pids.append(process.pid)
        url = f"http://127.0.0.1:{port}"
        try:
            async with asyncio.timeout(READY_S):
                await _answers(Target(url, None), model)
        except TimeoutError:
            words = tail(folder / "dynamo.mocker.log")
            raise RuntimeError(f"dynamo did not start:\n{words}") from None
        yield url, pids


async def _answers(server: Target, model: str) -> None:
    """Return when a chat is answered."""
    chat = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    while True:
        try:
            msgspec.json.decode(await server.fetch("POST", "/v1/chat/completions", chat))
        except (OSError, ValueError):
            await asyncio.sleep(_POLL_S)
        else:
            return
