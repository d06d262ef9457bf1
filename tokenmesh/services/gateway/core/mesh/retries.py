"""Hedged requests and retries on the bus.

A queue group delivers a request to any process, also to one that hangs or dies with it. A hedged
request goes to a second process when the first one is slow, and again when a process has come back.
RetryPolicy decides how long to retry while a service cannot be reached: a restarting tokenizer or
NATS is away for seconds, an encoder that loads a large model for minutes.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from tokenmesh.services.gateway.core.mesh.sole_turns import SoleTurns
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.calls import CallSettings
from tokenmesh.shared.errors import (
    BusLost,
    DeadlineExceeded,
    Draining,
    NoResponders,
    Overloaded,
    TokenMeshError,
    Unavailable,
)
from tokenmesh.shared.ids import InstanceId
from tokenmesh.shared.messages import Message

_UNREACHABLE: Final = (NoResponders, Draining, BusLost)

_SELDOM: Final = 16
"""Interval of further requests once enough are sent, in multiples of the first one."""

_Call = Coroutine[object, object, Message]
_Task = asyncio.Task[Message]


async def hedged_request(
    send: Callable[[bool], _Call],
    *,
    hedge_after_s: float,
    max_requests: int,
    next_return: Callable[[], asyncio.Future[InstanceId]],
    turns: SoleTurns,
    ask_alone: Callable[[], _Call],
) -> Message:
    """The first answer to `send(is_hedge)`; after silence it is sent again, at doubled intervals.

    `next_return()` is done when a process has come, or come back: what was sent before may be lost,
    and is sent once more at once. That happens `max_requests` times at most. As soon as `turns` are
    due, `ask_alone()` takes the place of all further ones: a request that ends each process must
    not meet every new one.

    A retryable error counts only when no request is open any more. `max_requests` bounds the
    requests that processes may be working on, but for one now and then: all may be lost without a
    sign. One that reached no process does not count and is repeated soon, because an open one may
    have been lost with the bus.
    """
    asks = _Asks(send, hedge_after_s, max_requests, turns, ask_alone)
    back, num_returns = next_return(), 0
    asks.send()
    try:
        while True:
            waits: set[asyncio.Future[Any]] = {*asks.open}
            if num_returns < max_requests:
                waits.add(back)
            done, _ = await asyncio.wait(
                waits, timeout=asks.left_s, return_when=asyncio.FIRST_COMPLETED
            )
            if (task := asks.take(done)) is not None:
                return task.result()
            if back in done:
                num_returns, back = num_returns + 1, next_return()
                asks.begin_again()
                asks.send()
            elif asks.left_s is not None and asks.left_s <= 0.0:
                asks.send()
    finally:
        back.cancel()
        asks.cancel()


class _Asks:
    """The requests of one hedged request that are open, and when the next one is due."""

    def __init__(
        self,
        send: Callable[[bool], _Call],
        hedge_after_s: float,
        max_requests: int,
        turns: SoleTurns,
        ask_alone: Callable[[], _Call],
    ) -> None:
        self.open: set[_Task] = set()
        self._send = send
        self._turns = turns
        self._ask_alone = ask_alone
        self._alone: _Task | None = None
        """The request for sole turns, of which one is open at a time."""
        self._hedge_after_s = hedge_after_s
        self._max_requests = max_requests
        self._is_hedge = False
        self._sent_s = 0.0
        self.begin_again()

    def begin_again(self) -> None:
        """Begin again: what was sent before counts as lost."""
        self._num_sent = 0
        self._pause_s = 0.0

    def send(self) -> None:
        """Send it now; the next one is due later."""
        if self._alone in self.open:
            return
        if self._turns.are_due:
            self._alone = asyncio.create_task(self._ask_alone())
            self.open.add(self._alone)
        else:
            self.open.add(asyncio.create_task(self._send(self._is_hedge)))
            self._turns.num_shared += 1
        self._is_hedge = True
        self._num_sent, self._sent_s = self._num_sent + 1, monotonic_s()
        self._pause_s = 2 * self._pause_s or self._hedge_after_s
        if self._num_sent >= self._max_requests:
            self._pause_s = _SELDOM * self._hedge_after_s

    @property
    def left_s(self) -> float | None:
        """Time until the next one is due; None while none will be."""
        if self._alone in self.open:
            return None
        return max(0.0, self._sent_s + self._pause_s - monotonic_s())

    def take(self, done: set[asyncio.Future[Any]]) -> _Task | None:
        """The request whose outcome counts, of those that are done."""
        # of several, each error is looked at
        answered = sorted((each for each in self.open if each in done), key=self._is_final)
        self.open.difference_update(answered)
        for task in answered:
            if is_unreachable(task.exception()):
                self._num_sent, self._pause_s = self._num_sent - 1, self._hedge_after_s
                self._turns.num_shared -= task is not self._alone
        is_over = bool(answered) and (self._is_final(answered[-1]) or not self.open)
        return answered[-1] if is_over else None

    def _is_final(self, task: _Task) -> bool:
        error = task.exception()
        is_last = task is self._alone and not is_unreachable(error)
        return is_last or not (isinstance(error, TokenMeshError) and error.retryable)

    def cancel(self) -> None:
        """End those that are open."""
        for task in self.open:
            if not task.cancel():
                task.exception()


async def repeated_request(send: Callable[[], _Call], *, repeat_after_s: float) -> Message:
    """The first result, answer or error, of a request that is sent twice to one process if slow.

    A request that a process received before it died is never answered, while a second one fails at
    once with NoResponders.
    """
    tasks = [asyncio.create_task(send())]
    try:
        done, _ = await asyncio.wait(tasks, timeout=repeat_after_s)
        if not done:
            tasks.append(asyncio.create_task(send()))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class RetryPolicy:
    """The retries of one request: `call_attempts`, and more while the service is unreachable."""

    def __init__(
        self, settings: CallSettings, deadline_s: float, is_starting: Callable[[], bool]
    ) -> None:
        """`deadline_s`: of the request, absolute. `is_starting`: whether a process of the service
        says that it will answer soon."""
        self._settings = settings
        self._deadline_s = deadline_s
        self._is_starting = is_starting
        self._began_s = monotonic_s()
        self._num_failed = 0

    async def wait(self, error: TokenMeshError, *, is_silence: bool = False) -> None:
        """Return when it is time to retry. Raises the error if a retry is useless.

        `is_silence`: the error means that there was no answer. Overload is an answer: a retry at
        once would add to it.
        """
        self._num_failed += 1
        if not error.retryable or isinstance(error, Overloaded):
            raise error
        may_return = (is_silence or is_unreachable(error)) and self._has_time()
        if self._num_failed >= self._settings.call_attempts and not may_return:
            raise error
        pause_s = min(
            self._settings.retry_pause_s * self._num_failed, self._settings.retry_pause_max_s
        )
        if now_s() + pause_s >= self._deadline_s:
            raise DeadlineExceeded(f"no time left: {error.message}") from error
        await asyncio.sleep(pause_s)

    def _has_time(self) -> bool:
        waited_s = monotonic_s() - self._began_s
        return waited_s < self._settings.service_wait_s or self._is_starting()


def is_refusal(error: TokenMeshError) -> bool:
    """Return whether a service answered that it cannot, as opposed to not being reached."""
    return isinstance(error, Unavailable) and not is_unreachable(error)


def is_unreachable(error: BaseException | None) -> bool:
    """Return whether no process handled the request."""
    return isinstance(error, _UNREACHABLE)
