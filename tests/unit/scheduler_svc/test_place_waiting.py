"""Placing waiting requests leaves time for new ones."""

import asyncio
from typing import Any, cast

from tests.unit.scheduler_svc.test_request_queue import worker
from tokenmesh.services.scheduler_svc.actor import SchedulerActor
from tokenmesh.services.scheduler_svc.placement import LoadPlacement
from tokenmesh.services.scheduler_svc.request_queue import RequestQueue
from tokenmesh.shared.clock import monotonic_s, sleep_s
from tokenmesh.shared.config.placement import SchedulerSettings
from tokenmesh.shared.ids import InstanceId
from tokenmesh.shared.messages import Heartbeat
from tokenmesh.shared.metrics import Metrics

TRY_S = 0.01


class SlowQueue(RequestQueue):
    """A request always waits, and each attempt to place it blocks the event loop."""

    spent_s = 0.0

    @property
    def num_waiting(self) -> int:
        return 1

    async def place_waiting(self, now: float) -> None:
        began_s = monotonic_s()
        sleep_s(TRY_S)
        self.spent_s += monotonic_s() - began_s


async def test_heartbeats_of_many_workers_do_not_take_all_of_the_time() -> None:
    settings = SchedulerSettings()
    queue = SlowQueue(settings, lambda _: [worker("w")], LoadPlacement(settings))
    actor = SchedulerActor(settings, queue, cast("Any", None), Metrics(), lambda _: False)
    beat = Heartbeat(
        service="worker",
        instance_id=InstanceId("w"),
        epoch=1,
        sequence=1,
        version="0",
        load=worker("w").load,
    )

    async def beat_forever() -> None:
        while True:
            actor.on_beat(beat)
            await asyncio.sleep(0)

    began_s = monotonic_s()
    tasks = [
        asyncio.create_task(actor._place_waiting_forever()),
        asyncio.create_task(beat_forever()),
    ]
    while queue.spent_s < 20 * TRY_S:  # noqa: ASYNC110
        await asyncio.sleep(0)
    elapsed_s = monotonic_s() - began_s
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert queue.spent_s <= 0.6 * elapsed_s
