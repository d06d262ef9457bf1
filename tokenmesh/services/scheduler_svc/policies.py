"""Other ways to place than by estimated time to first token: to compare with, and to fall back to.

None of them asks the prefix index; all leave out workers without room.
"""

from collections.abc import Callable, Sequence
from typing import Final

import xxhash

from tokenmesh.services.scheduler_svc.placement import Decision, Placement, Placer, Worker
from tokenmesh.services.scheduler_svc.reservations import Reservation
from tokenmesh.shared.config.placement import SchedulerSettings
from tokenmesh.shared.messages.place import Place

_HASH_BYTES: Final = 8
_PREFIX_BLOCKS: Final = 16
"""Route blocks that say where a prompt belongs: long enough to tell two users of one system prompt
apart, short enough that a conversation stays where it began."""

Choose = Callable[[Place, Sequence[Worker]], Worker]
"""From the workers with room, at least one, in order of their ids."""


def make_placer(settings: SchedulerSettings, indexed: Callable[[], Placer]) -> Placer:
    """The placer that `scheduler.policy` names; `indexed` makes the default one."""
    if settings.policy == "round_robin":
        return ChosenPlacement(settings, RoundRobin().choose)
    if settings.policy == "prefix_hash":
        return ChosenPlacement(settings, choose_by_prefix)
    return Placement(settings) if settings.policy == "least_tokens" else indexed()


class ChosenPlacement(Placement):
    """Implements `Placer`: a rule chooses among the workers with room."""

    def __init__(self, settings: SchedulerSettings, choose: Choose) -> None:
        super().__init__(settings)
        self._choose = choose

    async def place(self, request: Place, workers: list[Worker], now: float) -> Decision:
        """See `Placer.place`."""
        free = [each for each in self.eligible(request, workers) if self.has_room(request, each)]
        free.sort(key=lambda worker: worker.worker_id)
        candidates = [self.weigh(request, worker) for worker in free]
        if not free:
            return Decision(None, candidates)
        chosen = self._choose(request, free)
        self.reservations.add(
            chosen.worker_id,
            Reservation(now, request.num_tokens, request.num_streams, request.tenant),
        )
        return Decision(chosen, candidates, self._settings.policy)


class RoundRobin:
    """Each worker in turn."""

    def __init__(self) -> None:
        self._count = 0

    def choose(self, _request: Place, workers: Sequence[Worker]) -> Worker:
        """The next one."""
        self._count += 1
        return workers[self._count % len(workers)]


def choose_by_prefix(request: Place, workers: Sequence[Worker]) -> Worker:
    """Rendezvous hashing: prompts that begin alike share a worker; few move when one leaves."""
    prefix = request.route_hashes[: _PREFIX_BLOCKS * _HASH_BYTES][-_HASH_BYTES:]
    key = prefix or request.request_id.encode()
    return max(
        workers, key=lambda worker: xxhash.xxh3_64_intdigest(key + worker.worker_id.encode())
    )
