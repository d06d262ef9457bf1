"""Profiling: one trace at a time of what the worker does, bounded in steps and in time.

It ends on request, after `profiler_max_steps` engine steps, or after `profiler_max_s`,
whichever comes first: a forgotten profile fills neither memory nor disk.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tokenmesh.services.worker_svc.loaded import Trace
from tokenmesh.services.worker_svc.sleep import SerialCommands
from tokenmesh.shared.clock import monotonic_s, now_ns
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import Conflict, InvalidInput, TokenMeshError
from tokenmesh.shared.ids import WorkerId
from tokenmesh.shared.messages import Profiled
from tokenmesh.shared.messages.control import EndedBy

logger = logging.getLogger(__name__)

SUFFIX: Final = ".trace.json.gz"


class Profiling:
    """Starts and ends traces. `make_trace` is None where there is nothing to trace."""

    def __init__(
        self,
        settings: WorkerSettings,
        worker_id: WorkerId,
        make_trace: Callable[[], Trace] | None,
    ) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._make_trace = make_trace
        self._commands = SerialCommands()
        self._trace: Trace | None = None
        self._began_s = 0.0
        self._num_steps = 0
        self._enough = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._outcome: Profiled | TokenMeshError | None = None
        """This is the outcome of a profile that has ended by itself and was not fetched yet."""

    async def start(self) -> None:
        """Begin a trace. Raises InvalidInput where there can be none, Conflict for a second one."""
        await self._commands.run(self._start())

    async def stop(self) -> Profiled:
        """The trace's file; also of one that has ended by itself. Raises Conflict without one."""
        return await self._commands.run(self._stop())

    def note_steps(self, num_steps: int) -> None:
        """The engine has taken steps."""
        self._num_steps += num_steps
        if self._num_steps >= self._settings.profiler_max_steps:
            self._enough.set()

    async def close(self) -> None:
        """The worker leaves: what was recorded is still written."""
        if self._trace is None:
            return
        try:
            await self.stop()
        except TokenMeshError as error:
            logger.error("%s", error.message)

    async def _start(self) -> None:
        folder = self._folder()
        if self._make_trace is None:
            raise InvalidInput("a simulated worker has nothing to profile")
        if self._trace is not None:
            raise Conflict("a profile is being taken already; POST /stop_profile ends it")
        await asyncio.to_thread(_prepare, folder)
        trace = self._make_trace()
        await asyncio.to_thread(trace.start)
        self._trace, self._outcome = trace, None
        self._began_s, self._num_steps = monotonic_s(), 0
        self._enough.clear()
        self._watch = asyncio.create_task(self._end_by_itself(trace), name="profile")
        logger.info("profiling into %s", folder)

    async def _stop(self) -> Profiled:
        if self._trace is not None:
            return await self._finish("asked")
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, TokenMeshError):
            raise outcome
        if outcome is None:
            raise Conflict("no profile is being taken; POST /start_profile begins one")
        return outcome

    async def _end_by_itself(self, trace: Trace) -> None:
        ended_by: EndedBy = "steps"
        try:
            async with asyncio.timeout(self._settings.profiler_max_s):
                await self._enough.wait()
        except TimeoutError:
            ended_by = "time"
        # the watch itself must not be cancelled by what it does
        self._watch = None
        await self._commands.run(self._keep_outcome(trace, ended_by))

    async def _keep_outcome(self, trace: Trace, ended_by: EndedBy) -> None:
        if self._trace is not trace:
            return
        try:
            self._outcome = await self._finish(ended_by)
        except TokenMeshError as error:
            logger.error("%s", error.message)
            self._outcome = error

    async def _finish(self, ended_by: EndedBy) -> Profiled:
        """End the trace, whatever comes of it. Raises TokenMeshError."""
        trace, self._trace = self._trace, None
        assert trace is not None
        if self._watch is not None:
            self._watch.cancel()
        num_steps, seconds = self._num_steps, monotonic_s() - self._began_s
        path = self._folder() / f"{self._worker_id}-{now_ns()}{SUFFIX}"
        try:
            await asyncio.to_thread(trace.write, path)
        except OSError as error:
            raise TokenMeshError(f"the profile cannot be written to {path}: {error}") from error
        logger.info("profile of %d steps in %.1f s: %s", num_steps, seconds, path)
        return Profiled(path=str(path), num_steps=num_steps, seconds=seconds, ended_by=ended_by)

    def _folder(self) -> Path:
        folder = self._settings.profiler_dir
        if folder is None:
            raise InvalidInput(
                "profiling is off: start the worker with --profiler-dir", param="profiler_dir"
            )
        return Path(folder).expanduser().absolute()


def _prepare(folder: Path) -> None:
    """Make the directory. Raises InvalidInput when nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror
        raise InvalidInput(f"profiler_dir {folder}: {reason}", param="profiler_dir") from error
    if not os.access(folder, os.W_OK):
        raise InvalidInput(f"profiler_dir {folder} is not writable", param="profiler_dir")
