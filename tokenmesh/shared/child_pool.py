"""ChildPool: a bounded pool of processes for work that may never end; a late one is killed.

A job and its answer are bytes behind a 4-byte little-endian length, over the child's stdin and
stdout. The child arms an alarm for each job (`serve`); the kernel ends it when that goes off,
whatever native code it is in.
"""

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Final

from tokenmesh.shared.config.child_environment import sandbox_environment
from tokenmesh.shared.errors import Overloaded, TokenMeshError, Unavailable

LENGTH_BYTES: Final = 4
_OVERLOADED_RETRY_S: Final = 0.5


class ChildLate(TokenMeshError):
    """The job ran out of its time; its process is gone."""


class ChildDied(TokenMeshError):
    """The process died in the job: of memory, or of what it was given."""


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """What bounds a pool."""

    processes: int
    queue: int
    """Jobs that may wait for a process."""
    time_s: float
    """Of a job; the child's own alarm."""
    start_s: float = 30.0
    """Of a start, and of what a child must do besides the job."""


class ChildPool:
    """Processes that are started when first needed. `stop` ends them all.

    A process that dies in a job fails that job only.
    """

    def __init__(
        self, purpose: str, module: str, arguments: Sequence[str], limits: ChildLimits, hello: bytes
    ) -> None:
        """`python -m module arguments`; it answers `hello` once it is ready for jobs.

        purpose names the jobs in errors.
        """
        self._purpose = purpose
        # -P: what lies in the folder, which may be a stranger's, must not be imported.
        self._command = (sys.executable, "-P", "-m", module, *arguments)
        self._limits = limits
        self._hello = hello
        self._num_waiting = 0
        self._children: list[Process] = []
        # None stands for a process that is not started, or is to be replaced.
        self._idle: asyncio.LifoQueue[Process | None] = asyncio.LifoQueue()
        for _ in range(limits.processes):
            self._idle.put_nowait(None)

    @property
    def processes(self) -> tuple[Process, ...]:
        """Those that were started and not replaced since."""
        return tuple(self._children)

    async def ask(self, job: bytes) -> bytes:
        """The answer. Raises ChildLate, ChildDied; Overloaded when too many jobs wait already."""
        if self._num_waiting >= self._limits.queue:
            raise Overloaded(f"too many {self._purpose} wait", retry_after_s=_OVERLOADED_RETRY_S)
        self._num_waiting += 1
        try:
            child = await self._idle.get()
        finally:
            self._num_waiting -= 1
        # Whatever interrupts the job, its child is in the middle of it and of no more use.
        survivor: Process | None = None
        try:
            if child is None or child.returncode is not None:
                child = await self._start()
            answer = await self._ask(child, job)
            survivor = child
            return answer
        finally:
            if survivor is None and child is not None:
                _kill(child)
            self._idle.put_nowait(survivor)

    async def stop(self) -> None:
        """End every process; a job in flight fails."""
        for child in self._children:
            assert child.stdin is not None
            child.stdin.close()
            _kill(child)
            await child.wait()
        self._children.clear()

    async def _start(self) -> Process:
        child = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, env=sandbox_environment()
        )
        self._children = [*(old for old in self._children if old.returncode is None), child]
        ready = False
        try:
            # The first answer says that the imports are done: they are not the job's time.
            async with asyncio.timeout(self._limits.start_s):
                await _exchange(child, self._hello)
            ready = True
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
            raise Unavailable(f"the process for {self._purpose} does not start") from error
        finally:
            if not ready:
                _kill(child)
        return child

    async def _ask(self, child: Process, job: bytes) -> bytes:
        limits = self._limits
        try:
            # The child's own alarm comes first; this one is for a child that lost it.
            async with asyncio.timeout(2 * limits.time_s + limits.start_s):
                return await _exchange(child, job)
        except TimeoutError:
            pass
        except (asyncio.IncompleteReadError, ConnectionError):
            if await child.wait() != -signal.SIGALRM:
                raise ChildDied("its process died") from None
        raise ChildLate(f"it takes longer than {limits.time_s:g} s")


async def _exchange(child: Process, data: bytes) -> bytes:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    await child.stdin.drain()
    length = await child.stdout.readexactly(LENGTH_BYTES)
    return await child.stdout.readexactly(int.from_bytes(length, "little"))


def _kill(child: Process) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.kill()


def serve(
    jobs: BinaryIO,
    answers: BinaryIO,
    time_s: float,
    prepare: Callable[[bytes], Callable[[], bytes]],
) -> None:
    """In the child: answer jobs in order until `jobs` ends.

    `prepare` reads a job and does what is not the job's own time; what it returns is bounded.
    """
    # Ctrl-C reaches the whole process group; this one leaves when its parent closes stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while length := jobs.read(LENGTH_BYTES):
        work = prepare(jobs.read(int.from_bytes(length, "little")))
        signal.setitimer(signal.ITIMER_REAL, time_s)
        answer = work()
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(len(answer).to_bytes(LENGTH_BYTES, "little") + answer)
        answers.flush()
