"""RetryPolicy: how often, and for how long, somebody is asked who is not there.

A tokenizer that starts again, or processes that have not all found a restarted NATS yet, are a hole
of seconds: a request waits it out. An answer, even a bad one, is worth a few attempts only.
"""

import asyncio
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

_NOBODY: Final = (NoResponders, Draining, BusLost)


class RetryPolicy:
    """Of one question, over all times that it is asked."""

    def __init__(self, settings: GatewaySettings, deadline_s: float) -> None:
        """`deadline_s`: of the request, absolute."""
        self._settings = settings
        self._deadline_s = deadline_s
        self._began_s = monotonic_s()
        self._num_failed = 0

    async def wait(self, error: TokenMeshError, *, is_silence: bool = False) -> None:
        """Return when it is time to ask again. Raises the error when there is no use in that.

        `is_silence`: the error only means that nobody said anything. Overload is an answer, not a
        failure: asking again at once would only add to it.
        """
        self._num_failed += 1
        if not error.retryable or isinstance(error, Overloaded):
            raise error
        is_nobody = is_silence or found_nobody(error)
        if self._num_failed >= self._settings.call_attempts and not (
            is_nobody and self._has_time()
        ):
            raise error
        pause_s = min(
            self._settings.retry_pause_s * self._num_failed, self._settings.retry_pause_max_s
        )
        if now_s() + pause_s >= self._deadline_s:
            raise DeadlineExceeded(f"no time left: {error.message}") from error
        await asyncio.sleep(pause_s)

    def _has_time(self) -> bool:
        return monotonic_s() - self._began_s < self._settings.service_wait_s


def is_own_word(error: TokenMeshError) -> bool:
    """Whether a service has said that it cannot, rather than nobody having said anything."""
    return isinstance(error, Unavailable) and not found_nobody(error)


def found_nobody(error: BaseException | None) -> bool:
    """Whether the question reached nobody who looked at it."""
    return isinstance(error, _NOBODY)
