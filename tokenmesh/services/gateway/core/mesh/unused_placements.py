"""UnusedPlacements: releases the reservation of a placement whose answer came too late."""

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
"""Releases at one time; further reservations expire."""
_IS_OVER: Final = -1


class UnusedPlacements:
    """Its client left while the request was queued, or another scheduler answered first."""

    def __init__(self, redis: Redis, members: Members, metrics: Metrics) -> None:
        self._release_script = redis.script(RELEASE)
        self._members = members
        self._count = metrics.counter("placements_unused")
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, answer: Message) -> None:
        """Release what a late answer reserved, if anything."""
        if isinstance(answer, Placed) and answer.reservation and len(self._tasks) < _MAX_TASKS:
            task = asyncio.create_task(self._release(answer.worker_id, answer.reservation))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _release(self, worker_id: WorkerId, reservation: str) -> None:
        member = self._members.get(InstanceId(worker_id))
        if member is None or not member.beat.models:
            return
        self._count.inc()
        held, field = IndexKeys(member.beat.models[0].name).reserved_by(reservation)
        try:
            await self._release_script([held], [field, _IS_OVER])
        except TokenMeshError as error:
            logger.info("cannot release a reservation, it will expire: %s", error)
