"""Asking the other services: with a deadline, again when it may help, and with the right answer.

A service of several processes is a queue group, so asking again reaches another one.
"""

import asyncio
from typing import TypeVar

from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import (
    DeadlineExceeded,
    Overloaded,
    ProtocolError,
    TokenMeshError,
)
from tokenmesh.shared.messages import Message, Place, Placed, Queued, Refused
from tokenmesh.shared.subjects import place as place_subject

_Answer = TypeVar("_Answer")


class Calls:
    """The bus as the gateway uses it."""

    def __init__(self, bus: Bus, settings: GatewaySettings) -> None:
        self._bus = bus
        self._settings = settings

    async def ask(
        self,
        subject: str,
        message: Message,
        expected: type[_Answer],
        *,
        timeout_s: float,
        deadline_s: float,
    ) -> _Answer:
        """The answer; one attempt takes `timeout_s` at most, all end at `deadline_s`.

        Raises the last error, ProtocolError for an answer of another type.
        """
        attempt = 1
        while True:
            limit_s = min(deadline_s, now_s() + timeout_s)
            try:
                answer = await self._bus.request(subject, message, deadline_s=limit_s)
            except TokenMeshError as error:
                await self._pause_or_raise(error, attempt, deadline_s)
            else:
                return _checked(answer, expected)
            attempt += 1

    async def place(self, message: Place, deadline_s: float) -> Placed:
        """Wait for a worker, as long as a scheduler says that there is hope.

        Raises Overloaded when it refuses.
        """
        attempt = 1
        while True:
            try:
                return await self._place_once(message, deadline_s)
            except TokenMeshError as error:
                await self._pause_or_raise(error, attempt, deadline_s)
            attempt += 1

    async def _place_once(self, message: Place, deadline_s: float) -> Placed:
        answer: Message | None = None
        answers = self._bus.converse(
            place_subject(message.model),
            message,
            deadline_s=deadline_s,
            idle_s=self._settings.place_idle_s,
        )
        async for answer in answers:
            if not isinstance(answer, Queued):
                break
        if isinstance(answer, Refused):
            raise Overloaded(answer.reason, retry_after_s=answer.retry_after_s)
        return _checked(answer, Placed)

    async def _pause_or_raise(self, error: TokenMeshError, attempt: int, deadline_s: float) -> None:
        """Overload is an answer, not a failure: asking again at once would only add to it."""
        is_final = not error.retryable or isinstance(error, Overloaded)
        if is_final or attempt >= self._settings.call_attempts:
            raise error
        pause_s = self._settings.retry_pause_s * attempt
        if now_s() + pause_s >= deadline_s:
            raise DeadlineExceeded(f"no time left: {error.message}") from error
        await asyncio.sleep(pause_s)


def _checked(answer: object, expected: type[_Answer]) -> _Answer:
    if not isinstance(answer, expected):
        got = type(answer).__name__
        raise ProtocolError(f"the answer is {got}, not {expected.__name__}")
    return answer
