"""Operator commands that change a worker's state: sleep and wake.

The engine's part happens on its own thread, between two steps, when it holds no request.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from tokenmesh.services.worker_svc.engine.engine import Engine
from tokenmesh.services.worker_svc.engine.request import Ending
from tokenmesh.services.worker_svc.loaded import Loaded
from tokenmesh.services.worker_svc.streams import WorkerStreams
from tokenmesh.services.worker_svc.thread import EngineHost, Perform
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.errors import Asleep, InvalidInput, Unavailable
from tokenmesh.shared.messages import Refused, Sleep, Slept, WakeUp, Woken
from tokenmesh.shared.messages.failed import to_failed

logger = logging.getLogger(__name__)

_LEVELS: Final = (1, 2)
_RETRY_AFTER_S: Final = 1.0

_Result = TypeVar("_Result")


class SerialCommands:
    """Runs commands one after the other. A caller past its deadline stops waiting; its command
    still runs to its end."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """The result of `work`, which begins when those before it have ended."""
        task = asyncio.create_task(self._in_turn(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _in_turn(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        async with self._turn:
            return await work


class SleepController:
    """Sleeps and wakes; one command at a time."""

    def __init__(
        self,
        loaded: Loaded,
        host: EngineHost,
        streams: WorkerStreams,
        end_all: Callable[[Ending], Coroutine[object, object, None]],
        beat: Callable[[], Coroutine[object, object, None]],
    ) -> None:
        """`end_all` ends every stream; `beat` publishes a heartbeat at once."""
        self._resident = loaded.resident
        self._host = host
        self._streams = streams
        self._end_all = end_all
        self._beat = beat
        self._commands = SerialCommands()
        self.level = 0
        """0: awake. Else no stream is taken, also on the way to that level; for the beat."""

    def refusal(self) -> Refused | None:
        """Why no stream is accepted now; None when streams are."""
        if self.level == 0:
            return None
        return Refused(reason="the worker is asleep", retry_after_s=_RETRY_AFTER_S)

    async def sleep(self, message: Sleep, timeout_s: float) -> Slept:
        """Go to sleep. Raises InvalidInput; Unavailable when streams outlast the time."""
        if message.level not in _LEVELS:
            raise InvalidInput(f"level is {message.level}, not 1 or 2", param="level")
        return await self._commands.run(self._sleep(message, timeout_s))

    async def wake(self, message: WakeUp) -> Woken:
        """Bring back what the tags name. Raises Unavailable and CheckpointError."""
        return await self._commands.run(self._wake(message))

    async def _sleep(self, message: Sleep, timeout_s: float) -> Slept:
        self.level = max(self.level, message.level)
        # schedulers place nothing more here meanwhile
        await self._beat()
        try:
            await self._quiet(message, timeout_s)
            began_s = monotonic_s()
            freed = await self._perform(lambda engine: self._go_to(engine, message.level))
        finally:
            self.level = self._resident.level
            await self._beat()
        seconds, gib = monotonic_s() - began_s, freed / (1 << 30)
        logger.info("asleep at level %d in %.2f s, %.2f GiB freed", self.level, seconds, gib)
        return Slept(level=self.level, freed_bytes=freed)

    async def _wake(self, message: WakeUp) -> Woken:
        began_s = monotonic_s()
        try:
            await self._perform(lambda engine: self._resident.wake(message.tags))
        finally:
            self.level = self._resident.level
            await self._beat()
        seconds = monotonic_s() - began_s
        logger.info("woke %s in %.2f s", " and ".join(message.tags) or "nothing", seconds)
        return Woken(level=self.level, seconds=seconds)

    async def _quiet(self, message: Sleep, timeout_s: float) -> None:
        """No stream is left when it returns."""
        if message.mode == "abort":
            asleep = to_failed(Asleep("the model was put to sleep"))
            await self._end_all(Ending("error", error=asleep))
        elif self._streams.num_live:
            logger.info("waiting for %d streams before sleep", self._streams.num_live)
        # raised before the deadline: a handler past it is cancelled without an answer
        if not await self._streams.wait_idle(0.9 * timeout_s):
            raise Unavailable(
                f"{self._streams.num_live} streams are still running after {timeout_s:.0f} s; "
                "the worker stays awake"
            )

    def _go_to(self, engine: Engine, level: int) -> int:
        engine.forget_kv()
        return self._resident.sleep(level)

    async def _perform(self, work: Callable[[Engine], _Result]) -> _Result:
        done: Future[_Result] = Future()
        self._host.submit(Perform(work, done))
        return await asyncio.wrap_future(done)
