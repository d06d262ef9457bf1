"""Streams: keeps a number of requests open at once, and remembers how each went."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from random import Random

from benchmarks.chaos_run.heard import Asker, Heard


class Streams:
    """`weights`: kinds of requests, and how many of each there are among so many."""

    def __init__(self, weights: Mapping[Asker, int], random: Random, timeout_s: float) -> None:
        self._askers = [asker for asker, weight in weights.items() for _ in range(weight)]
        self._random = random
        self._timeout_s = timeout_s
        self.heard: list[Heard] = []
        self.faults: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        """Requests by kind."""

    @property
    def moves(self) -> Counter[str]:
        """Why clients went to another gateway, and how often."""
        return Counter(reason for heard in self.heard for reason in heard.moves)

    @property
    def num_choices(self) -> int:
        """Streams in the mesh's sense: choices of requests."""
        return sum(len(each.choices) for each in self.heard)

    @property
    def num_tokens(self) -> int:
        """That were told, of all streams."""
        return sum(each.num_tokens for each in self.heard)

    async def run(self, concurrency: int, is_wanted: Callable[[], bool]) -> None:
        """Ask again and again, `concurrency` requests at a time, as long as it is wanted."""
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._repeat(is_wanted))

    async def _repeat(self, is_wanted: Callable[[], bool]) -> None:
        while is_wanted():
            heard = Heard(time.perf_counter())
            asker = self._random.choice(self._askers)
            try:
                async with asyncio.timeout(self._timeout_s):
                    heard.fault = await asker.ask(heard)
            except (TimeoutError, OSError) as error:
                heard.fault = type(error).__name__
            heard.ended_s = time.perf_counter()
            self.heard.append(heard)
            self.kinds[type(asker).__name__] += 1
            if heard.fault is not None:
                self.faults[f"{type(asker).__name__}: {heard.fault}"] += 1
