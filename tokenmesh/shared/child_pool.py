"""ChildPool: a bounded pool of processes for work that may never end; a late one is killed.

A job and its answer are bytes behind a 4-byte little-endian length, over the child's stdin and
stdout. The child arms an alarm for each job (`serve`); the kernel ends it when that goes off,
whatever native code it is in. A child that takes long to start can fork for each job: then the
fork ends, and the child stays as it was. No child outlives the process that started it, not even
while it starts.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import traceback
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Final

from tokenmesh.shared import parent_death
from tokenmesh.shared.config.environment import sandbox_environment
from tokenmesh.shared.errors import TokenMeshError, Unavailable
from tokenmesh.shared.fair_queue import FairSlots

logger = logging.getLogger(__name__)

LENGTH_BYTES: Final = 4
"""Before each job and answer in a pipe."""
_LATE: Final = b"\xff\xff\xff\xff"
"""In place of the length of an answer: the fork that worked on the job ran out of time."""
_DIED: Final = b"\xfe\xff\xff\xff"
"""The same: the fork died."""
_CLOSE_S: Final = 1.0
"""For the pipe of a killed process to close."""
_READ_BYTES: Final = 1 << 20


class ChildLate(TokenMeshError):
    """The job exceeded its time; its process was killed."""


class ChildDied(TokenMeshError):
    """The process died in the job: of memory, or of what it was given."""


class _ForkEnded(Exception):
    """The fork of a job ended without an answer; its parent is unchanged."""

    def __init__(self, is_late: bool) -> None:
        super().__init__()
        self.is_late = is_late


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Bounds of a pool: processes, queued jobs, and their time."""

    processes: int
    queue: int
    """Jobs that may wait for a process."""
    time_s: float
    """Seconds that a job may take; the child's own alarm ends it."""
    start_s: float = 30.0
    """Seconds for the start of a process, and for what a child must do besides the job."""
    most_each: int | None = None
    """Processes that one share may have at a time; None: all but one, where there are several."""


class ChildPool:
    """Processes that are started by `start` or when first needed. `stop` ends them all.

    A process that dies in a job fails that job only. Jobs of several shares take turns.
    """

    def __init__(
        self, purpose: str, module: str, arguments: Sequence[str], limits: ChildLimits, hello: bytes
    ) -> None:
        """`python -m module arguments`; it answers `hello` once it is ready for jobs.

        purpose names the jobs in errors.
        """
        self._purpose = purpose
        # -P: what lies in the folder, which may be a stranger's, must not be imported.
        start = (sys.executable, "-P", "-m", parent_death.__name__, str(os.getpid()))
        self._command = (*start, module, *arguments)
        self._limits = limits
        self._hello = hello
        most_each = limits.most_each or max(1, limits.processes - 1)
        self._slots = FairSlots(purpose, limits.processes, limits.queue, most_each=most_each)
        self._children: list[Process] = []
        # None stands for a process that is not started, or is to be replaced.
        self._idle: list[Process | None] = [None] * limits.processes
        self._starts: set[asyncio.Task[None]] = set()

    @property
    def processes(self) -> tuple[Process, ...]:
        """Those that were started and not replaced since."""
        return tuple(self._children)

    async def start(self, *, first_only: bool = False) -> None:
        """Start a process, then the others in the background. Raises Unavailable."""
        await self._start_idle()
        if not first_only:
            self.start_others()

    def start_others(self) -> None:
        """Start all but one of the processes, in the background."""
        for _ in range(self._limits.processes - 1):
            task = asyncio.create_task(self._start_idle())
            self._starts.add(task)
            task.add_done_callback(self._note_start)

    def _note_start(self, task: "asyncio.Task[None]") -> None:
        self._starts.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("%s", error)

    async def _start_idle(self) -> None:
        async with self._slots.slot(""):
            child: Process | None = None
            try:
                child = self._idle.pop(0)
                if child is None or child.returncode is not None:
                    child = None
                    child = await self._start()
            finally:
                self._idle.append(child)

    async def ask(self, job: bytes, share: str = "", cost: float = 1.0) -> bytes:
        """The answer. Raises ChildLate, ChildDied; Overloaded when too many jobs wait already.

        share: whose job it is, such as a tenant's; shares take turns by the cost of their jobs.
        """
        async with self._slots.slot(share, cost):
            return await self._work(job)

    async def _work(self, job: bytes) -> bytes:
        child = self._idle.pop()
        # Whatever interrupts the job, its child is in the middle of it and of no more use.
        survivor: Process | None = None
        try:
            if child is None or child.returncode is not None:
                child = None
                child = await self._start()
            answer = await self._ask(child, job)
            survivor = child
            if isinstance(answer, bytes):
                return answer
            raise answer
        finally:
            if survivor is None and child is not None:
                _kill(child)
            self._idle.append(survivor)

    async def stop(self) -> None:
        """End every process; a job in flight fails."""
        for task in self._starts:
            task.cancel()
        await asyncio.gather(*self._starts, return_exceptions=True)
        for child in self._children:
            assert child.stdin is not None
            child.stdin.close()
            _kill(child)
            await child.wait()
            await _close_pipes(child)
        self._children.clear()

    async def _start(self) -> Process:
        child = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=PIPE,
            stdout=PIPE,
            env=sandbox_environment(),
            start_new_session=True,
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

    async def _ask(self, child: Process, job: bytes) -> bytes | ChildLate | ChildDied:
        """Return what a child answers, or how its fork ended.

        Raises the same when the child has ended.
        """
        limits = self._limits
        late = ChildLate(f"it takes longer than {limits.time_s:g} s")
        try:
            # The child's own alarm comes first; this one is for a child that lost it.
            async with asyncio.timeout(2 * limits.time_s + limits.start_s):
                return await _exchange(child, job)
        except _ForkEnded as ended:
            return late if ended.is_late else ChildDied("its process died")
        except TimeoutError:
            pass
        except (asyncio.IncompleteReadError, ConnectionError):
            if await child.wait() != -signal.SIGALRM:
                raise ChildDied("its process died") from None
        raise late


async def _exchange(child: Process, data: bytes) -> bytes:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    await child.stdin.drain()
    length = await child.stdout.readexactly(LENGTH_BYTES)
    if length in (_LATE, _DIED):
        raise _ForkEnded(is_late=length == _LATE)
    return await child.stdout.readexactly(int.from_bytes(length, "little"))


async def _close_pipes(child: Process) -> None:
    """Read the answers of a killed process to the end: only then asyncio closes the pipe."""
    assert child.stdout is not None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_S):
            while not child.stdout.at_eof():
                try:
                    await child.stdout.read(_READ_BYTES)
                except RuntimeError:
                    # a job in flight still waits for its answer, and gets the end
                    await asyncio.sleep(0)
    await asyncio.sleep(0)


def _kill(child: Process) -> None:
    """End a process and its fork, which are a process group."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def serve(
    jobs: BinaryIO,
    answers: BinaryIO,
    time_s: float,
    prepare: Callable[[bytes], Callable[[], bytes]],
    forks: bool = False,
) -> None:
    """In the child: answer jobs in order until `jobs` ends.

    `prepare` reads a job and does what is not the job's own time; what it returns is bounded.
    forks: a fork of this process does the work, so that a job that is ended does not end this
    process with everything it has loaded.
    """
    # Ctrl-C reaches the whole process group; this one leaves when its parent closes stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while length := jobs.read(LENGTH_BYTES):
        work = prepare(jobs.read(int.from_bytes(length, "little")))
        answer = _framed_of_fork(work, time_s) if forks else _framed(work, time_s)
        answers.write(answer)
        answers.flush()


def _framed(work: Callable[[], bytes], time_s: float) -> bytes:
    signal.setitimer(signal.ITIMER_REAL, time_s)
    answer = work()
    signal.setitimer(signal.ITIMER_REAL, 0)
    return len(answer).to_bytes(LENGTH_BYTES, "little") + answer


def _framed_of_fork(work: Callable[[], bytes], time_s: float) -> bytes:
    source, target = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        # in any case, no code of the parent's may run twice
        try:
            parent_death.die_with(parent)
            os.close(source)
            with os.fdopen(target, "wb") as out:
                out.write(_framed(work, time_s))
            os._exit(0)
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(target)
    with os.fdopen(source, "rb") as answer:
        framed = answer.read()
    status = os.waitpid(pid, 0)[1]
    if status == 0:
        return framed
    return _LATE if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM else _DIED
