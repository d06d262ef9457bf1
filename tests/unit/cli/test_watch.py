"""A process that runs and does not answer is killed and started again; a slow one is left alone."""

import asyncio
import io
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from tokenmesh.cli.embedded.child import Child, ChildSpec, Phase
from tokenmesh.cli.embedded.ports import free_port
from tokenmesh.cli.embedded.run import running
from tokenmesh.cli.embedded.screen import Screen
from tokenmesh.cli.embedded.supervisor import Death, ProcessSupervisor
from tokenmesh.cli.embedded.watch import ProcessWatch
from tokenmesh.shared.config.environment import NotifyTarget, notify_environment, notify_target
from tokenmesh.shared.config.up import UpSettings
from tokenmesh.shared.errors import ConfigError
from tokenmesh.shared.lifecycle import Watchdog

LIMITS = UpSettings(restart_min_s=0.01, restart_max_s=0.02, max_restarts=0, hung_s=1.0, ready_s=30)
SERVICE = (
    "import asyncio, sys, time\n"
    "from tokenmesh.shared.lifecycle import Watchdog\n"
    "async def main():\n"
    "    with Watchdog() as watchdog:\n"
    "        time.sleep({loads_s}); watchdog.ready(); print('ready', flush=True)\n"
    "        await asyncio.sleep({works_s})\n"
    "        while True: pass\n"
    "asyncio.run(main())"
)
ENDLESS = 60
SERVER = (
    "import socket, time\n"
    "server = socket.create_server(('127.0.0.1', {port}))\n"
    "while True:\n"
    "    client, _ = server.accept()\n"
    "    line = client.recv(100); client.sendall(b'-' + line); client.close()"
)


@dataclass
class Watched:
    """A supervisor with a watch, and what became of the children."""

    supervisor: ProcessSupervisor
    address: Path
    lines: list[str] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)

    def service(self, *, loads_s: float = 0.0, works_s: float = ENDLESS) -> ChildSpec:
        code = SERVICE.format(loads_s=loads_s, works_s=works_s)
        environment = notify_environment(str(self.address), LIMITS.hung_s)
        command = (sys.executable, "-c", code)
        return ChildSpec("service", command, Phase.MESH, environment)

    async def start(self, spec: ChildSpec) -> Child:
        self.supervisor.never_give_up()
        await self.supervisor.start([spec])
        return self.supervisor.children[0]

    async def wait(self, *, readies: int = 0, deaths: int = 0) -> None:
        """Until so many children were ready and have died."""
        while self.lines.count("ready") < readies or len(self.deaths) < deaths:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    lines: list[str] = []
    deaths: list[Death] = []
    supervisor = ProcessSupervisor(
        LIMITS, lambda _, line: lines.append(line), lambda death, _: deaths.append(death)
    )
    watch = ProcessWatch(LIMITS, lambda: supervisor.children)
    address = tmp_path / "notify"
    with watch.listening(address):
        watching = asyncio.create_task(watch.run())
        yield Watched(supervisor, address, lines, deaths)
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    await supervisor.stop(0.0, asyncio.Event())


async def test_a_service_whose_event_loop_spins_is_replaced(watched: Watched) -> None:
    await watched.start(watched.service(works_s=0.1))
    await watched.wait(readies=2, deaths=1)
    assert watched.deaths[0].exit_code == -signal.SIGKILL
    assert "did not answer for up.hung_s = 1 s" in watched.deaths[0].tail[-1]


async def test_a_service_that_is_stopped_for_good_is_replaced(watched: Watched) -> None:
    child = await watched.start(watched.service())
    await watched.wait(readies=1)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    await watched.wait(readies=2, deaths=1)


async def test_a_service_that_works_loads_long_or_pauses_is_left_alone(watched: Watched) -> None:
    child = await watched.start(watched.service(loads_s=1.5 * LIMITS.hung_s))
    await watched.wait(readies=1)
    assert child.pid is not None
    for _ in range(2):
        os.kill(child.pid, signal.SIGSTOP)
        await asyncio.sleep(LIMITS.hung_s / 4)
        os.kill(child.pid, signal.SIGCONT)
        await asyncio.sleep(LIMITS.hung_s / 2)
    assert watched.deaths == []


async def test_a_service_that_never_gets_ready_is_replaced(watched: Watched) -> None:
    child = await watched.start(watched.service(loads_s=ENDLESS))
    child.began_s -= LIMITS.ready_s
    await watched.wait(deaths=1)
    assert "not ready after up.ready_s" in watched.deaths[0].tail[-1]


async def test_no_child_is_blamed_for_what_this_process_missed(watched: Watched) -> None:
    child = await watched.start(watched.service())
    await watched.wait(readies=1)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    # As when the machine sleeps: the child was silent, and so were all.
    time.sleep(1.5 * LIMITS.hung_s)  # noqa: ASYNC251
    os.kill(child.pid, signal.SIGCONT)
    await asyncio.sleep(1.5 * LIMITS.hung_s)
    assert watched.deaths == []


@pytest.mark.parametrize("greeting", [b"", b"PING\r\n"])
async def test_a_server_that_does_not_answer_is_replaced(watched: Watched, greeting: bytes) -> None:
    port = free_port()
    code = SERVER.format(port=port)
    if not greeting:
        code = code.replace("client.recv(100)", "b'INFO'").replace("line);", "line + b'\\n');")
    spec = ChildSpec(
        "server", (sys.executable, "-c", code), Phase.SERVER, port=port, greeting=greeting
    )
    child = await watched.start(spec)
    await asyncio.sleep(1.5 * LIMITS.hung_s)
    assert watched.deaths == []
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    await watched.wait(deaths=1)


async def test_a_child_that_says_nothing_of_itself_is_not_watched(watched: Watched) -> None:
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    await watched.start(ChildSpec("child", command, Phase.MESH))
    await asyncio.sleep(1.5 * LIMITS.hung_s)
    assert watched.deaths == []


async def test_a_folder_too_deep_for_a_socket_is_explained(tmp_path: Path) -> None:
    watch = ProcessWatch(LIMITS, tuple)
    with pytest.raises(ConfigError, match="TMPDIR"), watch.listening(tmp_path / ("x" * 120)):
        pass


def test_the_environment_of_systemd_is_understood() -> None:
    assert notify_target({}) is None
    assert notify_target({"NOTIFY_SOCKET": "vsock:1:2"}) is None
    own, other = str(os.getpid()), str(os.getpid() + 1)
    variables = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "2000000"}
    assert notify_target(variables) == NotifyTarget("\0x", 2.0)
    assert notify_target(variables | {"WATCHDOG_PID": own}) == NotifyTarget("\0x", 2.0)
    assert notify_target(variables | {"WATCHDOG_PID": other}) == NotifyTarget("\0x", None)
    assert notify_target({"NOTIFY_SOCKET": "/run/x"}) == NotifyTarget("/run/x", None)


async def test_a_supervisor_that_is_gone_does_not_disturb_a_service(tmp_path: Path) -> None:
    with Watchdog(NotifyTarget(str(tmp_path / "absent"), 0.01)) as watchdog:
        watchdog.ready()
        await asyncio.sleep(0.05)


async def test_a_watch_that_fails_is_reported_and_the_mesh_goes_on() -> None:
    file = io.StringIO()

    async def fail() -> None:
        raise ValueError("a mistake of ours")

    async with running("the watch", fail(), Screen(Console(file=file), is_verbose=False)):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert "the watch has failed: ValueError('a mistake of ours')" in file.getvalue()
