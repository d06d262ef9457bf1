"""OpenRequests: the POST requests that this gateway answers now, and how recent ones ended."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final

from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.shared.clock import monotonic_s

WINDOW_S: Final = 60
"""Seconds over which ended requests are counted."""
_FIRST_ERROR: Final = 500
_FIRST_REFUSAL: Final = 400


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request whose response is not complete."""

    path: str
    context: RequestContext


@dataclass(slots=True)
class Outcomes:
    """Requests that have ended."""

    requests: int = 0
    errors: int = 0
    """With a status of 500 or more."""
    refused: int = 0
    """With a status of 400 to 499."""


@dataclass(slots=True)
class _Slot(Outcomes):
    second: int = -1


class OpenRequests:
    """POST requests in the order of their arrival; the server bounds their number."""

    def __init__(self) -> None:
        self._numbers = count()
        self._requests: dict[int, OpenRequest] = {}
        self._slots = [_Slot() for _ in range(WINDOW_S)]

    def __len__(self) -> int:
        return len(self._requests)

    def begin(self, path: str, context: RequestContext) -> int:
        """Add a request; returns the number for `end`."""
        number = next(self._numbers)
        self._requests[number] = OpenRequest(path, context)
        return number

    def end(self, number: int, now: float | None = None) -> None:
        """The response is complete; `now` is monotonic."""
        context = self._requests.pop(number).context
        second = int(monotonic_s() if now is None else now)
        slot = self._slots[second % WINDOW_S]
        if slot.second != second:
            slot.second, slot.requests, slot.errors, slot.refused = second, 0, 0, 0
        slot.requests += 1
        slot.errors += context.status >= _FIRST_ERROR
        slot.refused += _FIRST_REFUSAL <= context.status < _FIRST_ERROR

    def newest_first(self) -> Iterator[OpenRequest]:
        """A copy, so that requests may come and go meanwhile."""
        return iter([*reversed(self._requests.values())])

    def outcomes(self, now: float) -> Outcomes:
        """Requests that ended in the last `WINDOW_S` seconds."""
        since = int(now) - WINDOW_S
        found = [slot for slot in self._slots if slot.second > since]
        return Outcomes(
            sum(slot.requests for slot in found),
            sum(slot.errors for slot in found),
            sum(slot.refused for slot in found),
        )
