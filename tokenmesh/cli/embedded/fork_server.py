"""ForkServer: one process imports what several services need, and forks them.

Each service that computes would import torch for itself: 180 MB and two seconds of CPU. Forked,
they share the pages that none of them writes. It lives for the start of a mesh alone: a service
that dies later is started as a program again.
"""

import asyncio
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tokenmesh.cli.embedded.child import ChildSpec, child_environment
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.parent_death import adopting_orphans, die_with, dies_with_parent

_MODULE: Final = "tokenmesh.cli.embedded.fork_server"
_READY: Final = b"ready"
_ANSWER_S: Final = 60.0
"""Deadline of imports and of a fork; then services are started as programs."""
_ADOPTED_S: Final = 5.0
_POLL_S: Final = 0.001
_ROOM: Final = {"TOKENMESH_ROOM": "-" * 4096}
"""For variables that a child has and the server has not."""
_MAX_BYTES: Final = 1 << 17


class ForkServer:
    """Owns the process from `start` to `close`. Linux only: see `adopting_orphans`."""

    def __init__(self, socket_: socket.socket, process: asyncio.subprocess.Process) -> None:
        self._socket = socket_
        self._process = process

    @classmethod
    async def start(cls, specs: Sequence[ChildSpec]) -> "ForkServer | None":
        """The server of these children, whose imports are done; None where there cannot be one."""
        if sys.platform != "linux" or len(specs) < 2:
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        modules = sorted({module for spec in specs for module in spec.imports})
        # A fork shows its command in place of the server's, where it has to fit.
        room = max(len(_joined(spec.command)) for spec in specs)
        # Threads do not outlive a fork, and OpenBLAS begins them when it is imported.
        environment = {**child_environment(specs[0]), "OPENBLAS_NUM_THREADS": "1", **_ROOM}
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", _MODULE, str(theirs.fileno()), *modules, "-" * room),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env=environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                preexec_fn=dies_with_parent(),
            )
        server = cls(ours, process)
        try:
            if await server._answer() == _READY:
                return server
        except BaseException:
            await server.close()
            raise
        await server.close()
        return None

    async def fork(self, spec: ChildSpec, output: int) -> "ForkedProcess | None":
        """A child of this process that writes to `output`; None: start it as a program.

        The program of its command has to be a module of this Python: `python -P -m MODULE ...`.
        """
        message = json.dumps([os.getpid(), spec.command, child_environment(spec)]).encode()
        with adopting_orphans():
            try:
                socket.send_fds(self._socket, [message], [output])
            except OSError:  # it has died, or the environment is larger than a message may be
                return None
            answer = await self._answer()
        return ForkedProcess(int(answer)) if answer else None

    async def _answer(self) -> bytes:
        """Its next message; empty when it has died or is late."""
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.wait_for(loop.sock_recv(self._socket, 64), _ANSWER_S)
        except (OSError, TimeoutError):
            return b""

    async def close(self) -> None:
        """End the server; its forks go on."""
        self._socket.close()
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class ForkedProcess:
    """A child that asyncio has not started: what `Child` needs of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._fd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._fd, self._reap)

    async def wait(self) -> int:
        """The exit code; minus the number of the signal that ended it."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Raises ProcessLookupError once it has ended."""
        os.kill(self.pid, signal.SIGTERM)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()


def main() -> None:
    """Import the modules, then fork for each message until `up` closes its end."""
    _, fd, *modules, _ = sys.argv
    asked = socket.socket(fileno=int(fd))
    for module in modules:
        importlib.import_module(module)
    # The collector of a fork would write to the page of each object.
    gc.collect()
    gc.freeze()
    asked.send(_READY)
    while True:
        message, outputs, _, _ = socket.recv_fds(asked, _MAX_BYTES, 1)
        if not message:
            return
        parent, command, environment = json.loads(message)
        if _forked(asked, outputs[0]):
            break
    asked.close()
    _become(parent, command, environment, outputs[0])
    runpy.run_module(command[3], run_name="__main__", alter_sys=True)


def _forked(asked: socket.socket, output: int) -> bool:
    """Fork twice: True in the grandchild. Its parent ends, so that `up` adopts it.

    The server tells its number only then: `up` does not adopt for longer than it waits for that.
    """
    number, numbers = os.pipe()
    if parent := os.fork():
        os.close(output)
        os.close(numbers)
        os.waitpid(parent, 0)
        asked.send(os.read(number, 64))
        os.close(number)
        return False
    if child := os.fork():
        os.write(numbers, str(child).encode())
        os._exit(0)
    os.close(number)
    os.close(numbers)
    return True


def _become(parent: int, command: list[str], environment: dict[str, str], output: int) -> None:
    """Make this process as `Child` starts one."""
    late_s = monotonic_s() + _ADOPTED_S
    while os.getppid() != parent and monotonic_s() < late_s:
        select.select((), (), (), _POLL_S)
    die_with(parent)
    os.setsid()
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command[3:]
    _show(command, [f"{name}={text}" for name, text in environment.items()])


def _show(command: Sequence[str], variables: Sequence[str]) -> None:
    """Let `ps` and /proc show these: they are read from where the first ones stood in memory."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # arg_start to env_end, see proc(5)
    borders = [int(each) for each in fields[45:49]]
    with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        for begin, end, words in zip(
            borders[::2], borders[1::2], (command, variables), strict=True
        ):
            memory.seek(begin)
            memory.write(_joined(words)[: end - begin].ljust(end - begin, b"\0"))


def _joined(command: Sequence[str]) -> bytes:
    return b"".join(os.fsencode(word) + b"\0" for word in command)


if __name__ == "__main__":
    main()
