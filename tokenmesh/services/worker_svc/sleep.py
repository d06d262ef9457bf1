"""Operator commands that change a worker's state: sleep and wake.

The engine's part happens on its own thread, between two steps, when it holds no request.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from math import inf
from typing import Any, Final, TypeVar

import msgspec

from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.request.spec import Ending
from tokenmesh.services.worker_svc.loaded import Loaded
from tokenmesh.services.worker_svc.on_demand import LEVEL, LOOK_S, OnDemand
from tokenmesh.services.worker_svc.streams import WorkerStreams
from tokenmesh.services.worker_svc.thread import EngineHost, Perform
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.errors import Asleep, Draining, InvalidInput, Unavailable
from tokenmesh.shared.messages import Refused, Sleep, Slept, WakeUp, Woken
from tokenmesh.shared.messages.beat import WorkerLoad
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
        on_demand: OnDemand | None = None,
        settle_kv: Callable[[], Coroutine[object, object, None]] | None = None,
    ) -> None:
        """`end_all` ends every stream; `beat` publishes a heartbeat at once. `settle_kv` ends what
        is moved to other workers and stores.

        `on_demand`: when the worker sleeps by itself; None: never.
        """
        self._resident = loaded.resident
        self._host = host
        self._streams = streams
        self._end_all = end_all
        self._beat = beat
        self._on_demand = on_demand
        self._settle_kv = settle_kv
        self._commands = SerialCommands()
        self.level = self._resident.level
        """0: awake. Else no stream is taken, also on the way to that level; for the beat."""

    def refusal(self, keep_alive_s: float | None) -> Refused | None:
        """Why no stream is accepted now; None: one is, with its keep-alive.

        Raises Draining where the worker is on demand: it has fallen asleep since the placement,
        and the next one wakes it.
        """
        if self.level == 0:
            if self._on_demand is not None:
                self._on_demand.use(keep_alive_s)
            return None
        reason = "the worker is asleep"
        if self._on_demand is not None:
            raise Draining(reason)
        return Refused(reason=reason, retry_after_s=_RETRY_AFTER_S)

    def describe(self, load: WorkerLoad) -> WorkerLoad:
        """The load with when the worker will sleep, where it does so by itself."""
        if self._on_demand is None or self.level:
            return load
        used_s = monotonic_s() if self._streams.num_live else self._streams.used_s
        left_s = self._on_demand.left_s(used_s)
        return msgspec.structs.replace(
            load,
            idle_s=max(0.0, self._on_demand.idle_s(used_s)),
            sleeps_in_s=None if left_s == inf else max(0.0, left_s),
        )

    async def sleep_when_idle(self) -> None:
        """Sleep whenever the keep-alive has passed, until cancelled."""
        assert self._on_demand is not None
        while True:
            await self._streams.wait_idle(None)
            if self.level == LEVEL:
                await self._on_demand.wait_for_change(inf)
            elif not self._on_demand.may_sleep(self._streams.used_s):
                left_s = self._on_demand.left_s(self._streams.used_s)
                await self._on_demand.wait_for_change(min(left_s, LOOK_S))
            elif not self._streams.num_live:
                # a request may have come in between
                with suppress(Unavailable):
                    await self.sleep(Sleep(level=LEVEL, mode="idle"), 0.0)

    async def sleep(self, message: Sleep, timeout_s: float) -> Slept:
        """Go to sleep. Raises InvalidInput; Unavailable when streams outlast the time."""
        if message.level not in _LEVELS:
            raise InvalidInput(f"level is {message.level}, not 1 or 2", param="level")
        return await self._commands.run(self._sleep(message, timeout_s))

    async def wake(self, message: WakeUp) -> Woken:
        """Bring back what the tags name. Raises Unavailable and CheckpointError."""
        return await self._commands.run(self._wake(message))

    async def _sleep(self, message: Sleep, timeout_s: float) -> Slept:
        if message.mode == "idle":
            self._check_idle()
        self.level = max(self.level, message.level)
        # schedulers place nothing more here meanwhile
        await self._beat()
        try:
            await self._quiet(message, timeout_s)
            if self._settle_kv is not None:
                await self._settle_kv()
            began_s = monotonic_s()
            freed = await self._perform(lambda engine: self._go_to(engine, message.level))
        finally:
            self.level = self._resident.level
            if self._on_demand is not None and self.level == LEVEL:
                self._on_demand.sleeps()
            await self._beat()
        seconds, gib = monotonic_s() - began_s, freed / (1 << 30)
        logger.info("asleep at level %d in %.2f s, %.2f GiB freed", self.level, seconds, gib)
        return Slept(level=self.level, freed_bytes=freed)

    async def _wake(self, message: WakeUp) -> Woken:
        began_s = monotonic_s()
        if self._on_demand is not None:
            self._on_demand.begin_to_wake()
        was_asleep = self.level > 0
        try:
            await self._perform(lambda engine: self._resident.wake(message.tags))
        except BaseException:
            if self._on_demand is not None and was_asleep:
                # what did come back would hold memory that others wait for
                await self._perform(lambda engine: self._go_to(engine, LEVEL))
            raise
        finally:
            self.level = self._resident.level
            if self._on_demand is not None:
                self._note_woken(self._on_demand, was_asleep=was_asleep)
                if message.keep_alive_s is not None:
                    self._on_demand.use(message.keep_alive_s)
            await self._beat()
        seconds = monotonic_s() - began_s
        logger.info("woke %s in %.2f s", " and ".join(message.tags) or "nothing", seconds)
        return Woken(level=self.level, seconds=seconds)

    def _note_woken(self, on_demand: OnDemand, *, was_asleep: bool) -> None:
        if self.level == LEVEL:
            on_demand.stays_asleep()
        elif was_asleep:
            on_demand.has_woken()

    def _check_idle(self) -> None:
        """Raises Unavailable while streams run, or the request that woke the worker is to come."""
        num_live = self._streams.num_live
        if num_live or (self._on_demand is not None and self._on_demand.is_awaited):
            what = f"{num_live} streams are running" if num_live else "a request is awaited"
            raise Unavailable(f"{what}; the worker stays awake")

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
