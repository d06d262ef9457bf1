"""The scheduler actor: answers Place and Wake, and sends Queued while one waits."""

import asyncio
from collections.abc import Callable
from typing import Final

from tokenmesh.services.scheduler_svc.model_queue import WaitingRequest
from tokenmesh.services.scheduler_svc.request_queue import RequestQueue
from tokenmesh.services.scheduler_svc.waker import Waker
from tokenmesh.shared.actor import Actor, Context, handles
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.placement import SchedulerSettings
from tokenmesh.shared.errors import Asleep, Cancelled, TokenMeshError, Unavailable
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.messages.beat import Heartbeat
from tokenmesh.shared.messages.place import Awake, Place, Placed, Queued, Wake
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.telemetry import span

RETRY_INTERVAL_S: Final = 0.05
"""Waiting requests are tried again so often without a heartbeat."""


class SchedulerActor(Actor):
    """Any replica can answer any Place or Wake: what it knows comes from heartbeats."""

    def __init__(
        self,
        settings: SchedulerSettings,
        queue: RequestQueue,
        waker: Waker,
        metrics: Metrics,
        is_starting: Callable[[ModelName], bool],
    ) -> None:
        """`is_starting`: whether a worker will soon have loaded the model."""
        super().__init__()
        self._settings = settings
        self._queue = queue
        self._waker = waker
        self._metrics = metrics
        self._is_starting = is_starting
        self._may_have_room = asyncio.Event()
        metrics.gauge_of("placement_waiting", lambda: queue.num_waiting)

    async def start(self) -> None:
        """Start the task that places waiting requests."""
        self.spawn(self._place_waiting_forever, "place waiting requests")

    async def stop(self) -> None:
        """Leave wakes to another scheduler."""
        await self._waker.stop()

    @handles(Place)
    async def place(self, request: Place, context: Context) -> Placed:
        """Answer with a worker. Raises Overloaded when too many requests wait."""
        began_s = monotonic_s()
        try:
            self._refuse_if_asleep(request.model)
            waiting = await self._queue.submit(request, began_s)
            try:
                placed = waiting.placed or await self._wait(waiting, context)
            finally:
                self._queue.remove(waiting)
        except TokenMeshError as error:
            self._count(error.code)
            raise
        except asyncio.CancelledError:
            self._count(Cancelled.code)
            raise
        self._count("placed")
        seconds = self._metrics.histogram("placement_seconds", model_name=request.model)
        seconds.observe(monotonic_s() - began_s)
        return placed

    @handles(Wake)
    async def wake(self, message: Wake, context: Context) -> Awake:
        """Answer when a worker of the model is awake. Raises Asleep when it cannot be woken."""
        wake = asyncio.create_task(self._waker.wake(message, context.deadline_s))
        try:
            while not wake.done():
                if not message.is_passed_on:
                    # Silence would mean that this scheduler has died.
                    await context.interim(Queued(position=0))
                await asyncio.wait((wake,), timeout=self._settings.keepalive_s)
            return wake.result()
        finally:
            wake.cancel()

    def _count(self, outcome: str) -> None:
        self._metrics.counter("placements", outcome=outcome).inc()

    def on_beat(self, beat: Heartbeat) -> None:
        """Try waiting requests again: the heartbeat of a worker may show room."""
        if beat.load is not None and self._queue.num_waiting:
            self._may_have_room.set()

    async def _wait(self, waiting: WaitingRequest, context: Context) -> Placed:
        self._may_have_room.set()  # the placing task sleeps while no request waits
        with span("queue"):
            while waiting.placed is None:
                self._refuse_if_asleep(waiting.request.model)
                self._refuse_without_workers(waiting)
                await context.interim(Queued(position=self._queue.position(waiting)))
                await _wait_for(waiting.is_placed, self._settings.keepalive_s)
            return waiting.placed

    def _refuse_without_workers(self, waiting: WaitingRequest) -> None:
        waited_s = monotonic_s() - waiting.since_s
        request = waiting.request
        if (
            waited_s >= self._settings.worker_wait_s
            and not self._queue.has_workers(request)
            and not self._is_starting(request.model)
        ):
            what = request.model if request.lora is None else request.lora
            raise Unavailable(f"no live worker serves {what!r}", retry_after_s=1.0)

    def _refuse_if_asleep(self, model: ModelName) -> None:
        if self._queue.is_asleep(model):
            retry_after_s = self._settings.asleep_retry_after_s
            raise Asleep(f"every worker of {model!r} sleeps", retry_after_s=retry_after_s)

    async def _place_waiting_forever(self) -> None:
        while True:
            is_idle = not self._queue.num_waiting
            interval_s = None if is_idle else RETRY_INTERVAL_S
            await _wait_for(self._may_have_room, interval_s)
            self._may_have_room.clear()
            if self._queue.num_waiting:
                began_s = monotonic_s()
                await self._queue.place_waiting(began_s)
                # With many tenants and workers one pass takes milliseconds, and each heartbeat
                # triggers one: leave as much time to other requests.
                await asyncio.sleep(monotonic_s() - began_s)


async def _wait_for(event: asyncio.Event, seconds: float | None) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
