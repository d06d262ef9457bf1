"""Supervisor: background tasks that are started again when they crash."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.service import ServiceSettings

logger = logging.getLogger(__name__)

Work = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Pauses in seconds; the fields of the same names in `ServiceSettings`."""

    restart_min_s: float = 0.1
    restart_max_s: float = 10.0
    restart_reset_s: float = 60.0

    @classmethod
    def of(cls, settings: ServiceSettings) -> "RestartPolicy":
        """The configured pauses."""
        return cls(settings.restart_min_s, settings.restart_max_s, settings.restart_reset_s)


class Supervisor:
    """Owns the background tasks of one actor."""

    def __init__(self, on_fatal: Callable[[str], None], policy: RestartPolicy) -> None:
        self._on_fatal = on_fatal
        self._policy = policy
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
        pause_s = self._policy.restart_min_s
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
            if monotonic_s() - started_s >= self._policy.restart_reset_s:
                pause_s = self._policy.restart_min_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._policy.restart_max_s)
