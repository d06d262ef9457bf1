"""Fair use of the event loop: long work for one request lets the others run in between."""

import asyncio
import contextvars
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, ParamSpec, TypeVar

from tokenmesh.shared.clock import monotonic_s

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

_TURN_S: Final = 0.002

SWITCH_S: Final = 0.001
"""For `sys.setswitchinterval`: the event loop and the thread of `off_loop` alternate this fast."""

# One thread: with more, the event loop would wait for each of them.
_thread: Final = ThreadPoolExecutor(1, "off-loop")


async def off_loop(
    is_long: bool,
    function: Callable[_Given, _Result],
    *args: _Given.args,
    **kwargs: _Given.kwargs,
) -> _Result:
    """The function's result; it runs in a thread where `is_long`.

    This helps where the work is Python's, not where one call into C holds the interpreter's lock.
    The number of open requests bounds the queue of the thread.
    """
    if not is_long:
        return function(*args, **kwargs)
    work = partial(contextvars.copy_context().run, function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_thread, work)


class Turns:
    """Divides one long piece of work. Call `rest` between its steps."""

    def __init__(self) -> None:
        self._end_s = monotonic_s() + _TURN_S

    async def rest(self) -> None:
        """Yield to the event loop when the turn is over."""
        if monotonic_s() > self._end_s:
            await asyncio.sleep(0)
            self._end_s = monotonic_s() + _TURN_S


class OneByOne:
    """Runs pieces of work that need much memory one at a time, in their order."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Inside the block no other piece runs. The number of open requests bounds the queue."""
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


class StartLimiter:
    """Starts at most `per_turn` requests in one turn of the event loop, in order of arrival.

    A start takes about half a millisecond: hundreds at once would stop the tokens of all other
    streams meanwhile. The number of open requests bounds the queue.
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
            asyncio.get_running_loop().call_soon(self._begin_turn)
        if self._num_left:
            self._num_left -= 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def _begin_turn(self) -> None:
        self._num_left = self._per_turn
        while self._waiting and self._num_left:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                self._num_left -= 1
        self._is_counting = self._num_left < self._per_turn
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._begin_turn)
