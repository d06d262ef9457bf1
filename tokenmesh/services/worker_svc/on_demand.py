"""OnDemand: when a worker whose model is on demand may wake and when it sleeps again.

Workers of one machine share its memory: lock files bound how many of them are awake. The system
releases the lock of a process that dies.
"""

import asyncio
import fcntl
import os
from collections.abc import Callable
from math import inf
from pathlib import Path
from socket import gethostname
from typing import Final

from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.on_demand import NEVER, OnDemandModel, OnDemandSettings
from tokenmesh.shared.errors import Overloaded

SLOT_POLL_S: Final = 0.2
"""It says how often a worker that starts looks for a free slot."""
AWAITED_S: Final = 10.0
"""A worker that was woken does not sleep for so long before its first request."""

LEVEL: Final = 2
"""This is the level of its sleep: nothing of the model stays in memory."""
_RETRY_AFTER_S: Final = 1.0
LOOK_S: Final = 1.0
"""It says how often an idle worker that is awake looks whether its slot is wanted."""


class AwakeSlots:
    """Lock files in a directory; a worker that is awake holds one of them."""

    def __init__(self, settings: OnDemandSettings) -> None:
        self._folder = settings.slots_dir
        self._count = settings.max_awake
        self._held: int | None = None

    @property
    def name(self) -> str:
        """The same for all workers that share the slots; empty: there is no bound."""
        return "" if self._folder is None else f"{gethostname()}:{self._folder}"

    def take(self) -> bool:
        """Take a slot, or keep the one that is held; False: all are taken."""
        if self._folder is None or self._held is not None:
            return True
        for number in range(self._count):
            if (held := _lock(self._folder / f"slot-{number}")) is not None:
                self._held = held
                return True
        return False

    async def wait(self, poll_s: float) -> None:
        """Take a slot; meanwhile workers that are awake see that one is wanted."""
        wanted = None
        try:
            while not self.take():
                wanted = self._mark(fcntl.LOCK_EX) if wanted is None else wanted
                await asyncio.sleep(poll_s)
        finally:
            if wanted is not None:
                os.close(wanted)

    def is_wanted(self) -> bool:
        """Return whether a worker that starts waits for a slot."""
        if self._folder is None:
            return False
        if (mark := self._mark(fcntl.LOCK_SH)) is None:
            return True
        os.close(mark)
        return False

    def _mark(self, kind: int) -> int | None:
        assert self._folder is not None
        return _lock(self._folder / "wanted", kind)

    def release(self) -> None:
        """Release the slot, if one is held."""
        if self._held is not None:
            os.close(self._held)
            self._held = None


def _lock(path: Path, kind: int = fcntl.LOCK_EX) -> int | None:
    """The descriptor of a locked file; None where another process has locked it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


class OnDemand:
    """The keep-alive and the slot of one worker. Used on the event loop."""

    def __init__(
        self, model: OnDemandModel, settings: OnDemandSettings, count_sleep: Callable[[], None]
    ) -> None:
        """`count_sleep` is called each time that the worker has gone to sleep."""
        self._count_sleep = count_sleep
        self._default_s = self._keep_alive_s = model.keep_alive_s
        self._settings = settings
        self._slots = AwakeSlots(settings)
        self._used_s = self._awaited_until_s = -inf
        self._changed = asyncio.Event()

    @property
    def slots_name(self) -> str:
        """For the model card, see `AwakeSlots.name`."""
        return self._slots.name

    @property
    def is_awaited(self) -> bool:
        """Return whether the request for which it was woken has yet to come."""
        return monotonic_s() < self._awaited_until_s

    async def wait_for_slot(self) -> None:
        """Before the model is loaded: return when that is allowed."""
        await self._slots.wait(SLOT_POLL_S)

    def stays_asleep(self) -> None:
        """Nothing of the model is in memory after it was loaded once, or did not fit."""
        self._slots.release()

    def begin_to_wake(self) -> None:
        """Take a slot. Raises Overloaded while others hold all of them."""
        if not self._slots.take():
            raise Overloaded(
                f"the limit of {self._settings.max_awake} awake on-demand workers is reached",
                retry_after_s=_RETRY_AFTER_S,
            )

    def has_woken(self) -> None:
        """The model is in memory: the request that woke it is to come."""
        self._used_s = monotonic_s()
        self._awaited_until_s = self._used_s + AWAITED_S
        self._set_keep_alive(self._default_s)

    def sleeps(self) -> None:
        """Nothing of the model is in memory: release the slot."""
        self._awaited_until_s = -inf
        self._slots.release()
        self._count_sleep()

    def use(self, keep_alive_s: float | None) -> None:
        """A request has come, perhaps with a keep-alive of its own."""
        if self.is_awaited:
            self._changed.set()
        self._awaited_until_s, self._used_s = -inf, monotonic_s()
        if keep_alive_s is not None:
            self._set_keep_alive(keep_alive_s)

    def idle_s(self, used_s: float) -> float:
        """Seconds since the last use; `used_s`: the end of the last stream, monotonic."""
        return monotonic_s() - max(used_s, self._used_s)

    def left_s(self, used_s: float) -> float:
        """Seconds until an idle worker sleeps."""
        left_s = self._keep_alive_s - self.idle_s(used_s)
        return max(left_s, self._awaited_until_s - monotonic_s())

    def may_sleep(self, used_s: float) -> bool:
        """Return whether an idle worker sleeps now: its time has passed, or its slot is wanted."""
        return self.left_s(used_s) <= 0 or (not self.is_awaited and self._slots.is_wanted())

    async def wait_for_change(self, seconds: float) -> None:
        """Return after that time, or earlier when the keep-alive changes or the worker wakes."""
        self._changed.clear()
        try:
            async with asyncio.timeout(None if seconds == inf else seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    def _set_keep_alive(self, seconds: float) -> None:
        self._keep_alive_s = NEVER if seconds < 0 else seconds
        self._changed.set()
