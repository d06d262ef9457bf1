"""A service as a process: real signals, the death of its parent, its exit code and last words."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.servers import Server
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Envelope
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.messages import Heartbeat

ROOT = Path(__file__).parents[2]

SERVICE = """
import asyncio, sys, time
from tokenmesh.shared.config import Settings
from tokenmesh.shared.service import Mesh, run_service

async def build(mesh: Mesh) -> None:
    if "fail" in sys.argv:
        raise RuntimeError("cannot be built")
    if "slow" in sys.argv:
        print("loading", flush=True, file=sys.stderr)
        await asyncio.to_thread(time.sleep, 60)

settings = Settings.model_validate_json(sys.argv[1])
sys.exit(run_service("worker", settings, build))
"""
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]])
time.sleep(60)
"""


@pytest.fixture
def settings_json(nats_server: Server, redis_server: Server) -> str:
    """Settings of a process with quick beats, secrets included."""
    return f"""{{
        "bus": {{"url": "nats://127.0.0.1:{nats_server.port}", "user": "tokenmesh",
                 "password": "{nats_server.password}"}},
        "redis": {{"url": "redis://127.0.0.1:{redis_server.port}",
                   "password": "{redis_server.password}"}},
        "service": {{"worker_beat_interval_s": 0.02, "exit_with_parent": true,
                     "parent_poll_s": 0.02}}
    }}"""


@pytest.fixture
async def beats(bus: MessageBus) -> "asyncio.Queue[Heartbeat]":
    """Every beat on the bus."""
    queue: asyncio.Queue[Heartbeat] = asyncio.Queue()

    async def receiver(envelope: Envelope) -> None:
        assert isinstance(envelope.message, Heartbeat)
        queue.put_nowait(envelope.message)

    await bus.subscribe(subjects.ALL_BEATS, receiver)
    await bus.flush()
    return queue


async def start(code: str, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        *arguments,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=asyncio.subprocess.PIPE,
    )


async def finish(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    """Exit code and what was logged."""
    async with asyncio.timeout(15):
        _, log = await process.communicate()
    return process.returncode, log.decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_ends_a_process_cleanly(
    beats: "asyncio.Queue[Heartbeat]", settings_json: str, number: signal.Signals
) -> None:
    process = await start(SERVICE, settings_json)
    async with asyncio.timeout(15):
        await beats.get()
        process.send_signal(number)
        while not (await beats.get()).leaving:
            pass
    code, log = await finish(process)
    assert code == 0, log
    assert f"{number.name}: draining" in log
    assert "Traceback" not in log


async def test_process_leaves_when_its_parent_is_killed(
    beats: "asyncio.Queue[Heartbeat]", settings_json: str
) -> None:
    parent = await start(PARENT, SERVICE, settings_json)
    async with asyncio.timeout(15):
        await beats.get()
        parent.kill()
        while not (await beats.get()).leaving:
            pass
    _, log = await finish(parent)
    assert "has ended: draining" in log


async def test_crash_at_start_says_why_and_exits_with_one(settings_json: str) -> None:
    code, log = await finish(await start(SERVICE, settings_json, "fail"))
    assert code == 1
    assert "RuntimeError: cannot be built" in log


async def test_a_signal_does_not_wait_for_a_thread_that_loads_a_model(settings_json: str) -> None:
    process = await start(SERVICE, settings_json, "slow")
    assert process.stderr is not None
    async with asyncio.timeout(15):
        while b"loading" not in await process.stderr.readline():
            pass
    process.send_signal(signal.SIGTERM)
    code, log = await finish(process)
    assert code == 0, log
    assert "SIGTERM: draining" in log
