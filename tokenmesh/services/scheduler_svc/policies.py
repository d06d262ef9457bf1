"""The other values of `scheduler.policy`: for comparisons, and to fall back to.

None of them queries the prefix index; all skip workers without room.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Final

import xxhash

from tokenmesh.services.scheduler_svc.placement import LoadPlacement, Placer, Worker
from tokenmesh.shared.config.placement import SchedulerSettings
from tokenmesh.shared.messages.place import Candidate, Place

_HASH_BYTES: Final = 8
_PREFIX_BLOCKS: Final = 16
"""Route blocks that decide the worker of a prompt: enough to separate two users of one system
prompt, few enough that a conversation stays on its worker."""


def make_placer(settings: SchedulerSettings, indexed: Callable[[], Placer]) -> Placer:
    """The placer that `scheduler.policy` names; `indexed` makes the default one."""
    if settings.policy == "round_robin":
        return RoundRobin(settings, settings.policy)
    if settings.policy == "prefix_hash":
        return PrefixHash(settings, settings.policy)
    return LoadPlacement(settings) if settings.policy == "least_tokens" else indexed()


class RoundRobin(LoadPlacement):
    """Each worker with room in turn, by their ids."""

    _count = 0

    def choose(self, _request: Place, weighed: list[tuple[Worker, Candidate]]) -> Worker:
        self._count += 1
        workers = sorted((worker for worker, _ in weighed), key=attrgetter("worker_id"))
        return workers[self._count % len(workers)]


class PrefixHash(LoadPlacement):
    """Rendezvous hashing: prompts with the same beginning share a worker, and few prompts move when
    a worker leaves."""

    def choose(self, request: Place, weighed: list[tuple[Worker, Candidate]]) -> Worker:
        prefix = request.route_hashes[: _PREFIX_BLOCKS * _HASH_BYTES][-_HASH_BYTES:]
        key = prefix or request.request_id.encode()
        return max(
            (worker for worker, _ in weighed),
            key=lambda worker: xxhash.xxh3_64_intdigest(key + worker.worker_id.encode()),
        )
