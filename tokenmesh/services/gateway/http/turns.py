"""Turns: work for one request that gives way to all others every few milliseconds."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from tokenmesh.shared.clock import monotonic_s

_TURN_S: Final = 0.002


class Turns:
    """For one piece of work. Call `rest` between steps that are short themselves."""

    def __init__(self) -> None:
        self._end_s = monotonic_s() + _TURN_S

    async def rest(self) -> None:
        """Let the event loop look around when the turn is over."""
        if monotonic_s() > self._end_s:
            await asyncio.sleep(0)
            self._end_s = monotonic_s() + _TURN_S


class OneByOne:
    """Pieces of work that take much memory, one at a time and in their order."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Inside, no other one runs. Who waits has a request open, which bounds the queue."""
        while self._is_taken:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if not waiter.cancelled():
                    self._wake()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._is_taken = False
            self._wake()

    def _wake(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
