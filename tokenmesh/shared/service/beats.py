"""Beats: says at every interval that this process lives, what it serves and how busy it is."""

import asyncio
import logging
from collections.abc import Callable

import tokenmesh
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.errors import BusLost
from tokenmesh.shared.ids import InstanceId
from tokenmesh.shared.messages import Heartbeat
from tokenmesh.shared.messages.beat import PROTOCOL, ModelCard, WorkerLoad

logger = logging.getLogger(__name__)

BeatContent = Callable[[], tuple[list[ModelCard], WorkerLoad | None]]


def _nothing() -> tuple[list[ModelCard], WorkerLoad | None]:
    return [], None


class Beats:
    """The beat of one process."""

    def __init__(
        self, bus: Bus, service: str, instance_id: InstanceId, epoch: int, interval_s: float
    ) -> None:
        self._bus = bus
        self._service = service
        self._instance_id = instance_id
        self._epoch = epoch
        self._interval_s = interval_s
        self._sequence = 0
        self.content: BeatContent = _nothing
        self.count_queued: Callable[[], int] = int
        self.tokenizes: list[ModelCard] = []
        self.is_draining = False

    async def run(self) -> None:
        """Beat until cancelled. A late beat does not shift the ones after it."""
        next_s = monotonic_s()
        while True:
            await self.beat()
            next_s = max(next_s + self._interval_s, monotonic_s())
            await asyncio.sleep(next_s - monotonic_s())

    async def beat(self, *, is_leaving: bool = False) -> None:
        """One beat, now. While the bus is away there is none."""
        self._sequence += 1
        models, load = self.content()
        message = Heartbeat(
            service=self._service,
            instance_id=self._instance_id,
            epoch=self._epoch,
            sequence=self._sequence,
            version=tokenmesh.__version__,
            protocol=PROTOCOL,
            draining=self.is_draining,
            leaving=is_leaving,
            interval_s=self._interval_s,
            models=models,
            load=load,
            queued=self.count_queued(),
            tokenizes=self.tokenizes,
        )
        try:
            await self._bus.publish(subjects.beat(self._service, self._instance_id), message)
        except BusLost as error:
            logger.debug("no beat: %s", error)
