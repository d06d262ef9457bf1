"""Cancels: Cancel commands on their way to workers.

Whoever ends a stream is often being cancelled itself, so it only notes the command here; one
background task sends them.
"""

import asyncio
import logging

from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.ids import GatewayId, WorkerId
from tokenmesh.shared.messages import Cancel
from tokenmesh.shared.subjects import worker_control

logger = logging.getLogger(__name__)


class Cancels:
    """Sent in order, not answered: a stream that survives is a stray, and cancelled again."""

    def __init__(self, bus: Bus, gateway: GatewayId, limit: int) -> None:
        self._bus = bus
        self._gateway = gateway
        self._waiting: asyncio.Queue[tuple[WorkerId, Cancel]] = asyncio.Queue(limit)

    def put(self, worker_id: WorkerId, stream: int, attempt: int) -> None:
        """Tell a worker soon to stop an attempt. At the limit the oldest command is dropped."""
        cancel = Cancel(gateway=self._gateway, stream=stream, attempt=attempt)
        if self._waiting.full():
            self._waiting.get_nowait()
        self._waiting.put_nowait((worker_id, cancel))

    async def run(self) -> None:
        """Send for ever."""
        while True:
            worker_id, cancel = await self._waiting.get()
            await self._send(worker_id, cancel)

    async def flush(self) -> None:
        """Send what waits now."""
        while not self._waiting.empty():
            await self._send(*self._waiting.get_nowait())

    async def _send(self, worker_id: WorkerId, cancel: Cancel) -> None:
        try:
            await self._bus.publish(worker_control(worker_id), cancel)
        except TokenMeshError as error:
            logger.warning("a Cancel to %s is lost: %s", worker_id, error)
