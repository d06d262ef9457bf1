"""Child: one process that ends with its parent, and the last lines that it wrote."""

import asyncio
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Protocol

from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.environment import SOCKET, VARIABLES
from tokenmesh.shared.config.settings import ENV_PREFIX
from tokenmesh.shared.parent_death import dies_with_parent


class Phase(IntEnum):
    """Processes that stop together; lower ones first, so gateways before their services."""

    EDGE = 0
    MESH = 1
    SERVER = 2


@dataclass(frozen=True)
class ChildSpec:
    """Describes a process to start; `command` holds no secrets: other users can read it."""

    name: str
    command: tuple[str, ...]
    phase: Phase
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Added to the environment of `up`."""
    port: int | None = None
    """Loopback port that it accepts on once it has started."""
    model: str | None = None
    """The one that this process alone serves, where there are several."""
    greeting: bytes | None = None
    """The line that a client writes to `port`, to which a server that works answers with a line;
    None: it is not probed."""
    imports: tuple[str, ...] = ()
    """Modules that a `ForkServer` imports for it and others; empty: it is started as a program."""

    @property
    def service(self) -> str:
        """The name without the number."""
        return self.name.partition(" ")[0]

    @property
    def is_watched(self) -> bool:
        """True for a process that shows that it works, once it does."""
        return self.greeting is not None or SOCKET in self.environment


_CHUNK_BYTES: Final = 65536
_MAX_LINE_CHARS: Final = 8192
_LAST_WORDS_S: Final = 1.0

NOT_STARTED: Final = 126
"""Exit code of a process that could not start, as in shells."""

OnLine = Callable[[str, str], None]
"""Called with the child's name and a line of its output."""


class Process(Protocol):
    """A subset of `asyncio.subprocess.Process`."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    def terminate(self) -> None: ...


Fork = Callable[[ChildSpec, int], Awaitable[Process | None]]
"""Forks a child that writes to a file descriptor; None: it has to be started as a program."""


class Child:
    """Runs one process, and keeps the last lines that it wrote."""

    def __init__(self, spec: ChildSpec, tail_lines: int, on_line: OnLine) -> None:
        self.spec = spec
        self.tail: deque[str] = deque(maxlen=tail_lines)
        self.began_s = monotonic_s()
        self.answered_s: float | None = None
        """When it last showed that it works; None: not yet."""
        self._on_line = on_line
        self._process: Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id, once started."""
        return self._process.pid if self._process else None

    @property
    def is_running(self) -> bool:
        """True for a process that has started and has not been seen to end."""
        return self._process is not None and self._process.returncode is None

    async def start(self, fork: Fork | None = None) -> None:
        """Start the process in a group of its own: Ctrl-C at the terminal does not reach it.

        Raises OSError when the machine has no room for it.
        """
        # A pipe of our own: asyncio's `wait` would wait for grandchildren that hold its pipe.
        read_end, write_end = os.pipe()
        try:
            if fork is not None:
                self._process = await fork(self.spec, write_end)
            if self._process is None:
                self._process = await asyncio.create_subprocess_exec(
                    *self.spec.command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=write_end,
                    stderr=write_end,
                    env=child_environment(self.spec),
                    start_new_session=True,
                    preexec_fn=dies_with_parent(),
                )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._reader = asyncio.create_task(self._read(read_end), name=f"read {self.spec.name}")

    async def wait(self) -> int:
        """The exit code, once the process has ended and all it wrote is read."""
        if self._process is None or self._reader is None:
            return NOT_STARTED
        code = await self._process.wait()
        # Kill what it started, too, which closes the pipe.
        _kill_group(self._process.pid)
        await asyncio.wait((self._reader,), timeout=_LAST_WORDS_S)
        self._reader.cancel()
        return code

    def terminate(self) -> None:
        if self._process is not None and self.is_running:
            self._process.terminate()

    def kill(self, reason: str = "") -> None:
        """End it and its whole group at once; `reason` becomes the last line of its output."""
        if reason:
            self.tail.append(reason)
        if self._process is not None and self.is_running:
            _kill_group(self._process.pid)

    async def _read(self, read_end: int) -> None:
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_end, "rb")
        )
        try:
            await self._take_all(stream)
        finally:
            transport.close()

    async def _take_all(self, stream: asyncio.StreamReader) -> None:
        rest = ""
        while chunk := await stream.read(_CHUNK_BYTES):
            *lines, rest = (rest + chunk.decode("utf-8", "replace")).split("\n")
            for line in lines:
                self._take(line)
            rest = rest[-_MAX_LINE_CHARS:]
        self._take(rest)

    def _take(self, line: str) -> None:
        line = line.rstrip()[:_MAX_LINE_CHARS]
        if line:
            self.tail.append(line)
            self._on_line(self.spec.name, line)


def child_environment(spec: ChildSpec) -> dict[str, str]:
    """The parent's environment without its settings: they are in the child's file already.

    Nor is the parent's supervisor for its children.
    """
    inherited = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(ENV_PREFIX) and name not in VARIABLES
    }
    return {**inherited, "PYTHONUNBUFFERED": "1", **spec.environment}


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
