"""FairSlots: a few places for work, given to those who wait in turns over their shares."""

import asyncio
from collections import Counter, deque

from tokenmesh.shared.errors import TokenMeshError


class Full(TokenMeshError):
    """Too many wait already."""


class FairSlots:
    """Not for more than one event loop. A share is a name, such as a tenant's.

    A share with a name never has all of several slots, so that another one need not wait for its
    work to end. When too many wait, the share with the most of them loses its latest.
    """

    def __init__(self, num_slots: int, max_waiting: int) -> None:
        self._free = num_slots
        self._most_of_share = max(1, num_slots - 1)
        self._max_waiting = max_waiting
        self._num_running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By share, never empty; the first share is the next one to be served."""

    async def acquire(self, share: str) -> None:
        """Take a slot, or wait for one. Raises Full."""
        if share not in self._waiting and self._may_run(share):
            self._run(share)
            return
        self._make_room(share)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(share, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.release(share)
            else:
                self._forget(share, turn)
            raise

    def release(self, share: str) -> None:
        """Give a slot back; whoever is next has it before this returns."""
        self._free += 1
        self._num_running[share] -= 1
        if not self._num_running[share]:
            del self._num_running[share]
        while (ready := next(filter(self._may_run, self._waiting), None)) is not None:
            turns = self._waiting.pop(ready)
            turn = turns.popleft()
            if turns:
                # behind the other shares
                self._waiting[ready] = turns
            if not turn.done():
                self._run(ready)
                turn.set_result(None)

    def _may_run(self, share: str) -> bool:
        if not share:
            return self._free > 0
        return self._free > 0 and self._num_running[share] < self._most_of_share

    def _run(self, share: str) -> None:
        self._free -= 1
        self._num_running[share] += 1

    def _make_room(self, share: str) -> None:
        if sum(map(len, self._waiting.values())) < self._max_waiting:
            return
        longest = max(self._waiting, key=lambda each: len(self._waiting[each]), default=share)
        own = len(self._waiting.get(share, ()))
        if len(self._waiting.get(longest, ())) <= own + 1:
            raise Full("too many wait")
        latest = self._waiting[longest].pop()
        if not latest.done():
            latest.set_exception(Full("others have waited for less"))

    def _forget(self, share: str, turn: "asyncio.Future[None]") -> None:
        turns = self._waiting.get(share)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[share]
