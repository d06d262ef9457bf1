"""Streams: keeps a number of requests open at once, and remembers how each went."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from random import Random

from benchmarks.chaos_run.received import ReceivedResponse, RequestKind


class Streams:
    """`weights`: kinds of requests, and how many of each there are among so many."""

    def __init__(
        self, weights: Mapping[RequestKind, int], random: Random, timeout_s: float
    ) -> None:
        self._request_kinds = [
            request_kind for request_kind, weight in weights.items() for _ in range(weight)
        ]
        self._random = random
        self._timeout_s = timeout_s
        self.received: list[ReceivedResponse] = []
        self.faults: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        """Requests by kind."""

    @property
    def moves(self) -> Counter[str]:
        """Why clients went to another gateway, and how often."""
        return Counter(reason for received in self.received for reason in received.moves)

    @property
    def num_choices(self) -> int:
        """Streams in the mesh's sense: choices of requests."""
        return sum(len(each.choices) for each in self.received)

    @property
    def num_tokens(self) -> int:
        """Tokens that clients received, of all streams."""
        return sum(each.num_tokens for each in self.received)

    async def run(self, concurrency: int, is_wanted: Callable[[], bool]) -> None:
        """Keep `concurrency` requests open, as long as `is_wanted`."""
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._repeat(is_wanted))

    async def _repeat(self, is_wanted: Callable[[], bool]) -> None:
        while is_wanted():
            received = ReceivedResponse(time.perf_counter())
            request_kind = self._random.choice(self._request_kinds)
            try:
                async with asyncio.timeout(self._timeout_s):
                    received.fault = await request_kind.send(received)
            except (TimeoutError, OSError) as error:
                received.fault = type(error).__name__
            received.ended_s = time.perf_counter()
            self.received.append(received)
            self.kinds[type(request_kind).__name__] += 1
            if received.fault is not None:
                self.faults[f"{type(request_kind).__name__}: {received.fault}"] += 1
