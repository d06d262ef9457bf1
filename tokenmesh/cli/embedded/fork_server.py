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
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tokenmesh.cli.embedded.child import ChildSpec, child_environment
from tokenmesh.shared.parent_death import adopting_orphans, die_with, dies_with_parent

_MODULE: Final = "tokenmesh.cli.embedded.fork_server"
_READY: Final = b"ready"
_ANSWER_S: Final = 60.0
"""Deadline of imports and of a fork; then services are started as programs."""
_ROOM: Final = {"TOKENMESH_ROOM": "-" * 4096}
"""For variables that a child has and the server has not."""
_MAX_BYTES: Final = 1 << 17


class ForkServer:
    """Owns the process from `start` to `close`."""

    def __init__(self, socket_: socket.socket, process: asyncio.subprocess.Process) -> None:
        self._socket = socket_
        self._process = process

    @classmethod
    async def start(cls, specs: Sequence[ChildSpec]) -> "ForkServer | None":
        """Return a server that has imported what these children share, or None: then they are
        started as programs, which fewer than two of them always are."""
        if len(specs) < 2 or not _is_supported():
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        modules = sorted({module for spec in specs for module in spec.imports})
        # A fork shows its command in place of the server's, where it has to fit.
        room = max(len(_joined(spec.command)) for spec in specs)
        # Threads do not outlive a fork, and OpenBLAS begins them when it is imported.
        environment = {**child_environment(specs[0]), "OPENBLAS_NUM_THREADS": "1", **_ROOM}
        try:
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
        except OSError:  # the machine has no room for it
            ours.close()
            return None
        finally:
            theirs.close()
        server, is_ready = cls(ours, process), False
        try:
            is_ready = await server._answer() == _READY
        finally:
            if not is_ready:
                await server.close()
        return server if is_ready else None

    async def fork(self, spec: ChildSpec, output: int) -> "ForkedProcess | None":
        """A child of this process that writes to `output`; None: start it as a program.

        The program of its command has to be a module of this Python: `python -P -m MODULE ...`.
        """
        message = json.dumps([os.getpid(), spec.command, child_environment(spec)]).encode()
        # It runs on once `up` knows it: else it would be one more of a service, which goes on.
        known, knows = os.pipe()
        try:
            with adopting_orphans():
                socket.send_fds(self._socket, [message], [output, known])
                answer = await self._answer()
            if not answer:
                return None
            process = ForkedProcess(int(answer))
            os.write(knows, b"1")
            return process
        except OSError:  # the server has died, or the environment is larger than a message may be
            return None
        finally:
            os.close(known)
            os.close(knows)

    async def _answer(self) -> bytes:
        """Its next message; empty when it has died or is late, and then it is ended: an answer that
        comes later would be taken for that to another question."""
        loop = asyncio.get_running_loop()
        with suppress(OSError, TimeoutError):
            return await asyncio.wait_for(loop.sock_recv(self._socket, 64), _ANSWER_S)
        with suppress(ProcessLookupError):
            self._process.kill()
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
        message, fds, _, _ = socket.recv_fds(asked, _MAX_BYTES, 2)
        if not message:
            return
        parent, command, environment = json.loads(message)
        output, known = fds
        if _is_fork(asked):
            break
        os.close(output)
        os.close(known)
    asked.close()
    if not os.read(known, 1):
        os._exit(1)
    os.close(known)
    die_with(parent)
    _become(command, environment, output)
    runpy.run_module(command[3], run_name="__main__", alter_sys=True)


def _is_fork(asked: socket.socket) -> bool:
    """Fork twice and return True in the grandchild. Its parent ends, so that `up` adopts it.

    The server sends the process id only then, because `up` adopts only while it waits for that.
    """
    pids, pid = os.pipe()
    if middle := os.fork():
        os.close(pid)
        os.waitpid(middle, 0)
        asked.send(os.read(pids, 64))
        os.close(pids)
        return False
    if child := os.fork():
        os.write(pid, str(child).encode())
        os._exit(0)
    os.close(pids)
    os.close(pid)
    return True


def _become(command: list[str], environment: dict[str, str], output: int) -> None:
    """Make this process as `Child` starts one."""
    os.setsid()
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command[3:]
    # where /proc is not complete, as in some sandboxes, it shows the server's
    with suppress(OSError):
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


def _is_supported() -> bool:
    """Only Linux lets a process adopt, and some sandboxes have no file descriptors of processes."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _joined(command: Sequence[str]) -> bytes:
    return b"".join(os.fsencode(word) + b"\0" for word in command)


if __name__ == "__main__":
    main()
