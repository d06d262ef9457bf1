"""Cancels: Cancel commands on their way to workers."""

import asyncio
import logging

from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.ids import GatewayId, WorkerId
from tokenmesh.shared.messages import Cancel
from tokenmesh.shared.subjects import worker_control

logger = logging.getLogger(__name__)


class Cancels:
    """Commands are sent in order by one background task.

    A task that ends a stream is often being cancelled itself, so it cannot send. Commands are not
    acknowledged: a stream that still sends tokens is cancelled again.
    """

    def __init__(self, bus: Bus, gateway: GatewayId, limit: int) -> None:
        self._bus = bus
        self._gateway = gateway
        self._waiting: asyncio.Queue[tuple[WorkerId, Cancel]] = asyncio.Queue(limit)

    def put(self, worker_id: WorkerId, stream: int, attempt: int) -> None:
        """Queue a command. A full queue drops the oldest one."""
        cancel = Cancel(gateway=self._gateway, stream=stream, attempt=attempt)
        if self._waiting.full():
            self._waiting.get_nowait()
        self._waiting.put_nowait((worker_id, cancel))

    async def run(self) -> None:
        """Send commands until cancelled."""
        while True:
            await self._send(*await self._waiting.get())

    async def flush(self) -> None:
        """Send what is queued."""
        while not self._waiting.empty():
            await self._send(*self._waiting.get_nowait())

    async def _send(self, worker_id: WorkerId, cancel: Cancel) -> None:
        try:
            await self._bus.publish(worker_control(worker_id), cancel)
        except TokenMeshError as error:
            logger.warning("cannot send a Cancel to %s: %s", worker_id, error)
