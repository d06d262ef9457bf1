"""Renderer: a bounded pool of rendering processes, each killed and replaced when it runs late."""

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import PIPE, Process
from typing import Final

from tokenmesh.services.tokenizer_svc.render_job import (
    LENGTH_BYTES,
    RenderAnswer,
    RenderFailed,
    RenderJob,
    decode_answer,
    frame,
)
from tokenmesh.shared.config.tokenizer import TokenizerSettings
from tokenmesh.shared.errors import Overloaded, Unavailable

_CHILD: Final = "tokenmesh.services.tokenizer_svc.render_child"
_START_LIMIT_S: Final = 30.0
_OVERLOADED_RETRY_S: Final = 0.5


class Renderer:
    """Renders jobs in `num_processes` processes, started when first needed.

    A process that dies in a job (time or memory) fails that job only. `stop` ends them all.
    """

    def __init__(self, limits: TokenizerSettings, num_processes: int) -> None:
        self._limits = limits
        self._num_waiting = 0
        self._children: list[Process] = []
        # None stands for a process that is not started, or is to be replaced.
        self._idle: asyncio.LifoQueue[Process | None] = asyncio.LifoQueue()
        for _ in range(num_processes):
            self._idle.put_nowait(None)

    @property
    def processes(self) -> tuple[Process, ...]:
        """Those that were started and not replaced since."""
        return tuple(self._children)

    async def render(self, job: RenderJob) -> RenderAnswer:
        """The child's answer. Raises Overloaded when too many jobs wait already."""
        if self._num_waiting >= self._limits.render_queue:
            raise Overloaded(
                "too many chat templates wait to be rendered", retry_after_s=_OVERLOADED_RETRY_S
            )
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
            survivor = child if child.returncode is None else None
            return answer
        finally:
            if survivor is None and child is not None:
                self._discard(child)
            self._idle.put_nowait(survivor)

    async def stop(self) -> None:
        """End every process; a job in flight fails."""
        for child in self._children:
            assert child.stdin is not None
            child.stdin.close()
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
            await child.wait()
        self._children.clear()

    async def _start(self) -> Process:
        limits = self._limits
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _CHILD),
            *(str(limits.render_time_limit_s), str(limits.render_memory_bytes)),
            stdin=PIPE,
            stdout=PIPE,
        )
        self._children = [*(old for old in self._children if old.returncode is None), child]
        ready = False
        try:
            # The first answer says that the imports are done: they are not the job's time.
            async with asyncio.timeout(_START_LIMIT_S):
                await self._exchange(child, RenderJob(template="", max_chars=0, compile_only=True))
            ready = True
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
            raise Unavailable("the process that renders chat templates does not start") from error
        finally:
            if not ready:
                self._discard(child)
        return child

    async def _ask(self, child: Process, job: RenderJob) -> RenderAnswer:
        limit_s = self._limits.render_time_limit_s
        try:
            # The child's own alarm comes first; this one is for a child that lost it.
            async with asyncio.timeout(2 * limit_s):
                return await self._exchange(child, job)
        except TimeoutError:
            pass
        except (asyncio.IncompleteReadError, ConnectionError):
            if await child.wait() != -signal.SIGALRM:
                return RenderFailed("memory", "its process died")
        return RenderFailed("too_long", f"it takes longer than {limit_s:g} s")

    async def _exchange(self, child: Process, job: RenderJob) -> RenderAnswer:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(frame(job))
        await child.stdin.drain()
        length = await child.stdout.readexactly(LENGTH_BYTES)
        return decode_answer(await child.stdout.readexactly(int.from_bytes(length, "little")))

    def _discard(self, child: Process) -> None:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
