"""Hedged requests and retries on the bus.

A queue group delivers a request to any process, also to one that hangs or dies with it. A hedged
request goes to a second process when the first one is slow. RetryPolicy decides how long to retry
while a service cannot be reached: a restarting tokenizer or NATS is away for seconds.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Final

from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import (
    BusLost,
    DeadlineExceeded,
    Draining,
    NoResponders,
    Overloaded,
    TokenMeshError,
    Unavailable,
)
from tokenmesh.shared.messages import Message

_UNREACHABLE: Final = (NoResponders, Draining, BusLost)

_Call = Coroutine[object, object, Message]
_Task = asyncio.Task[Message]


async def hedged_request(
    send: Callable[[bool], _Call], *, hedge_after_s: float, max_requests: int
) -> Message:
    """The first answer to `send(is_hedge)`; after silence it is sent again, at doubled intervals.

    A retryable error counts only when no request is open any more. `max_requests` bounds the
    requests that processes may be working on. One that reached no process does not count and is
    repeated soon, because an open one may have been lost with the bus.
    """
    tasks: set[_Task] = {asyncio.create_task(send(False))}
    num_sent, pause_s = 1, hedge_after_s
    try:
        while True:
            timeout_s = pause_s if num_sent < max_requests else None
            done, still_open = await asyncio.wait(
                tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                if _is_final(task) or not still_open:
                    return task.result()
                if is_unreachable(task.exception()):
                    num_sent, pause_s = num_sent - 1, hedge_after_s
            tasks = set(still_open)
            if not done:
                tasks.add(asyncio.create_task(send(True)))
                num_sent, pause_s = num_sent + 1, 2 * pause_s
    finally:
        for task in tasks:
            task.cancel()


def _is_final(task: _Task) -> bool:
    error = task.exception()
    return not (isinstance(error, TokenMeshError) and error.retryable)


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

    def __init__(self, settings: GatewaySettings, deadline_s: float) -> None:
        """`deadline_s`: of the request, absolute."""
        self._settings = settings
        self._deadline_s = deadline_s
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
        return monotonic_s() - self._began_s < self._settings.service_wait_s


def is_refusal(error: TokenMeshError) -> bool:
    """Whether a service answered that it cannot, as opposed to not being reached."""
    return isinstance(error, Unavailable) and not is_unreachable(error)


def is_unreachable(error: BaseException | None) -> bool:
    """Whether no process handled the request."""
    return isinstance(error, _UNREACHABLE)
