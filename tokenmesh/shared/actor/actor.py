"""Actor: the base class of everything that handles messages, its context and background tasks."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar

import msgspec

from tokenmesh.shared.bus.base import Bus, Envelope
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.mesh import ServiceSettings
from tokenmesh.shared.messages import Message, Queued, Tokens


class Context:
    """Context of one message; valid until its handler returns."""

    __slots__ = ("_bus", "_envelope", "deadline_s")

    def __init__(self, bus: Bus, envelope: Envelope, deadline_s: float) -> None:
        self._bus = bus
        self._envelope = envelope
        self.deadline_s = deadline_s
        """Absolute, wall clock; the handler is cancelled when it passes."""

    @property
    def reply_to(self) -> str | None:
        """Subject of the answer; None when none is expected."""
        return self._envelope.reply_to

    @property
    def traceparent(self) -> str | None:
        return self._envelope.headers.traceparent

    @property
    def subject(self) -> str:
        """Where the message arrived."""
        return self._envelope.subject

    def remaining_s(self) -> float:
        """Seconds until the deadline, never negative."""
        return max(0.0, self.deadline_s - now_s())

    async def interim(self, message: Queued) -> None:
        """Send a keep-alive to the waiting caller."""
        await self._bus.reply(self._envelope, message)


logger = logging.getLogger(__name__)

Work = Callable[[], Coroutine[Any, Any, None]]


class BackgroundTasks:
    """Background tasks of one actor, started again when they crash."""

    def __init__(self, on_fatal: Callable[[str], None], settings: ServiceSettings) -> None:
        self._on_fatal = on_fatal
        self._settings = settings
        self._tasks: set[asyncio.Task[None]] = set()
        self.crashes: Counter[str] = Counter()
        """By task name."""

    def spawn(self, work: Work, name: str, *, is_fatal: bool = False) -> None:
        """Run `work()` until it returns; see `Actor.spawn`."""
        task = asyncio.create_task(self._watch(work, name, is_fatal), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Cancel every task and wait for it."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, work: Work, name: str, is_fatal: bool) -> None:
        pause_s = self._settings.restart_min_s
        while True:
            started_s = monotonic_s()
            try:
                return await work()
            except Exception:
                self.crashes[name] += 1
                logger.exception("background task %s crashed", name)
            if is_fatal:
                self._on_fatal(name)
                return
            if monotonic_s() - started_s >= self._settings.restart_reset_s:
                pause_s = self._settings.restart_min_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._settings.restart_max_s)


_Self = TypeVar("_Self", bound="Actor")
_Taken = TypeVar("_Taken", bound=msgspec.Struct)
_Answer = TypeVar("_Answer", bound="Message | None")
_Method = Callable[[_Self, _Taken, Context], Coroutine[object, object, _Answer]]

# Which message a handler takes is checked by `handles`; the table's type cannot.
Handler = Callable[[Any, Any, Context], Coroutine[object, object, "Message | None"]]

_MARK = "__handles__"


def handles(
    message_type: type[_Taken],
) -> Callable[[_Method[_Self, _Taken, _Answer]], _Method[_Self, _Taken, _Answer]]:
    """Mark a method as the handler of one message type.

    It returns the answer, or None: then a waiting caller receives `Done`. It raises a
    TokenMeshError to answer Failed.
    """

    def mark(
        method: _Method[_Self, _Taken, _Answer],
    ) -> _Method[_Self, _Taken, _Answer]:
        setattr(method, _MARK, message_type)
        return method

    return mark


class Actor:
    """Subclass it and mark handlers. The runtime sets `background` before `start`."""

    handlers: ClassVar[dict[type[Message | Tokens], Handler]] = {}
    background: BackgroundTasks

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = {
            getattr(method, _MARK): method
            for method in vars(cls).values()
            if hasattr(method, _MARK)
        }
        cls.handlers = {**cls.handlers, **own}

    async def start(self) -> None:
        """Called once, before the first message."""

    async def stop(self) -> None:
        """Called once, after the last message; background tasks are still running."""

    def spawn(
        self,
        work: Callable[[], Coroutine[Any, Any, None]],
        name: str,
        *,
        is_fatal: bool = False,
    ) -> None:
        """Run `work()` alongside the handlers until it returns or the actor stops.

        When it crashes it is called again after a pause; with `is_fatal` the service ends instead.
        """
        self.background.spawn(work, name, is_fatal=is_fatal)
