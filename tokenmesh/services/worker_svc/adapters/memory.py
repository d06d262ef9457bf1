"""AdapterMemory: the adapters whose matrices are in memory, and streams that wait for room."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

from tokenmesh.engine.adapters.adapter import ReadAdapter
from tokenmesh.services.worker_svc.adapters.lease import (
    AdapterLease,
    AdapterTurn,
    ResidentAdapter,
)
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.lora import LoraSettings
from tokenmesh.shared.errors import Cancelled, Overloaded


class AdapterMemory:
    """By content hash. Used by the event loop only."""

    def __init__(self, settings: LoraSettings, is_named: Callable[[str], bool]) -> None:
        """is_named: whether a name stands for a content."""
        self._settings = settings
        self._is_named = is_named
        self._resident: OrderedDict[str, ResidentAdapter] = OrderedDict()
        """Least recently used first."""
        self._waiting: OrderedDict[AdapterTurn, asyncio.Future[None]] = OrderedDict()
        """Streams that wait for room, in their order."""

    @property
    def num_resident(self) -> int:
        return len(self._resident)

    @property
    def num_active(self) -> int:
        """Those that streams use."""
        return sum(each.num_leases > 0 for each in self._resident.values())

    @property
    def num_waiting(self) -> int:
        """Streams that wait for room."""
        return len(self._waiting)

    def holds(self, content_hash: str) -> bool:
        return content_hash in self._resident

    def lease_now(self, content_hash: str) -> AdapterLease | None:
        """Matrices that are in memory, if the stream need not wait for them."""
        resident = self._resident.get(content_hash)
        if resident is None or self._waiting:
            return None
        if not resident.num_leases and self.num_active >= self._settings.max_loras:
            return None
        return self._lease(resident)

    async def lease(
        self,
        content_hash: str,
        read: Callable[[], Coroutine[Any, Any, ReadAdapter]],
        turn: AdapterTurn,
    ) -> AdapterLease:
        """Matrices; `read` brings those that are not in memory. See `AdapterStore.lease`."""
        if (lease := self.lease_now(content_hash)) is not None:
            return lease
        until_s = monotonic_s() + self._settings.load_timeout_s
        turn.on_give_up = self._call
        try:
            while not self._may_go(turn, content_hash):
                await self._wait(turn, until_s)
            # until the lease is taken no one behind it may take the room
            resident = self._resident.get(content_hash)
            if resident is None:
                resident = self.keep(await read())
                _check(turn)
            return self._lease(resident)
        finally:
            turn.on_give_up = None
            self._waiting.pop(turn, None)
            self._wake()

    def keep(self, read: ReadAdapter) -> ResidentAdapter:
        """Have matrices in memory; the least recently used ones without streams make room."""
        resident = self._resident.setdefault(read.content_hash, ResidentAdapter(read))
        self._resident.move_to_end(read.content_hash)
        self._trim()
        return resident

    def drop_unused(self, content_hash: str) -> None:
        """Forget matrices that neither a name nor a stream needs."""
        resident = self._resident.get(content_hash)
        if resident is None or resident.num_leases or self._is_named(content_hash):
            return
        del self._resident[content_hash]

    def _may_go(self, turn: AdapterTurn, content_hash: str) -> bool:
        _check(turn)
        self._waiting.setdefault(turn, asyncio.get_running_loop().create_future())
        if next(iter(self._waiting)) is not turn:
            return False
        resident = self._resident.get(content_hash)
        is_active = resident is not None and resident.num_leases > 0
        return is_active or self.num_active < self._settings.max_loras

    async def _wait(self, turn: AdapterTurn, until_s: float) -> None:
        called = self._waiting[turn] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(max(0.0, until_s - monotonic_s())):
                await called
        except TimeoutError as error:
            what = f"streams of {self._settings.max_loras} other adapters are running"
            raise Overloaded(f"{what}: no room for this one", retry_after_s=1.0) from error

    def _call(self, turn: AdapterTurn) -> None:
        """Let a stream that waits look again."""
        called = self._waiting.get(turn)
        if called is not None and not called.done():
            called.set_result(None)

    def _wake(self) -> None:
        """Call the first that waits."""
        if self._waiting:
            self._call(next(iter(self._waiting)))

    def _lease(self, resident: ResidentAdapter) -> AdapterLease:
        resident.num_leases += 1
        self._resident.move_to_end(resident.adapter.content_hash)
        return AdapterLease(resident.adapter, self._released)

    def _released(self, content_hash: str) -> None:
        self._resident[content_hash].num_leases -= 1
        self.drop_unused(content_hash)
        self._trim()
        self._wake()

    def _trim(self) -> None:
        surplus = len(self._resident) - self._settings.num_in_memory
        unused = [each for each, held in self._resident.items() if not held.num_leases]
        # the latest one was read for a stream that has no lease yet
        for content_hash in unused[: max(0, min(surplus, len(unused) - 1))]:
            del self._resident[content_hash]


def _check(turn: AdapterTurn) -> None:
    if turn.is_given_up:
        raise Cancelled("the stream ended before it had its adapter")
