"""Requests in service order: priority first (smaller is sooner), then arrival.

A preempted request keeps its arrival, so it comes back before all that came later.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from tokenmesh.engine.request.request import Request

service_order = attrgetter("order")
"""Sorts requests."""


class ServiceQueue:
    """A sorted list; the scheduler keeps one of waiting and one of running requests."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """First served first. `pop_last` is allowed meanwhile."""
        return iter(self._requests)

    @property
    def first(self) -> Request:
        return self._requests[0]

    def add(self, request: Request) -> None:
        """Take the place that priority and arrival give."""
        if self._requests and self._requests[-1].order > request.order:
            insort(self._requests, request, key=service_order)
        else:
            self._requests.append(request)

    def remove(self, request: Request) -> None:
        """The request must be in the queue."""
        index = bisect_left(self._requests, request.order, key=service_order)
        assert self._requests[index] is request
        del self._requests[index]

    def pop_last(self) -> Request:
        """Remove and return the one that is served last."""
        return self._requests.pop()
