"""UnusedPlacements: what a placement reserved is given back when its answer finds nobody.

A client left while its request waited for a worker, or another scheduler was quicker.
"""

import asyncio
import logging
from typing import Final

from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.ids import InstanceId, WorkerId
from tokenmesh.shared.membership import Members
from tokenmesh.shared.messages import Message, Placed
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.prefix_index import RELEASE, IndexKeys
from tokenmesh.shared.redis import Redis

logger = logging.getLogger(__name__)

_MAX_TASKS: Final = 256
"""Given back at one time; of more than these the worker finds that they are forgotten."""
_IS_OVER: Final = -1


class UnusedPlacements:
    """Fed with every answer that comes too late."""

    def __init__(self, redis: Redis, members: Members, metrics: Metrics) -> None:
        self._release = redis.script(RELEASE)
        self._members = members
        self._count = metrics.counter("placements_unused")
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, answer: Message) -> None:
        """Give back what it reserved, if it did."""
        if isinstance(answer, Placed) and answer.reservation and len(self._tasks) < _MAX_TASKS:
            task = asyncio.create_task(self._give_back(answer.worker_id, answer.reservation))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _give_back(self, worker_id: WorkerId, reservation: str) -> None:
        member = self._members.get(InstanceId(worker_id))
        if member is None or not member.beat.models:
            return
        self._count.inc()
        held, field = IndexKeys(member.beat.models[0].name).reserved_by(reservation)
        try:
            await self._release([held], [field, _IS_OVER])
        except TokenMeshError as error:
            logger.info("a reservation has to expire: %s", error)
