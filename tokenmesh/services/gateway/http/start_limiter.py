"""StartLimiter: a burst of requests begins in portions, and the event loop looks around in between.

All that has arrived at once would otherwise be taken in within one turn of the loop, at about half
a millisecond each: hundreds of requests would stop the tokens of everybody else meanwhile.
"""

import asyncio
from collections import deque


class StartLimiter:
    """Lets `per_turn` through in a turn of the event loop, in order of arrival.

    Who waits has a request open; so what bounds those bounds the queue.
    """

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._num_left = per_turn
        self._is_counting = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Return when it is this request's turn: at once, unless there are many."""
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._turn)
        if self._num_left:
            self._num_left -= 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def _turn(self) -> None:
        """The loop has looked around."""
        self._num_left = self._per_turn
        while self._waiting and self._num_left:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                self._num_left -= 1
        self._is_counting = self._num_left < self._per_turn
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._turn)
