"""The scheduler actor: answers Place, with Queued keep-alives while a request waits."""

import asyncio

from tokenmesh.services.scheduler_svc.desk import Desk
from tokenmesh.services.scheduler_svc.waiting import Ticket
from tokenmesh.shared.actor import Actor, Context, handles
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.placement import SchedulerSettings
from tokenmesh.shared.errors import Asleep, Cancelled, TokenMeshError, Unavailable
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.messages.beat import Heartbeat
from tokenmesh.shared.messages.place import Place, Placed, Queued
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.telemetry import span


class SchedulerActor(Actor):
    """Any replica answers any Place; what it knows comes from beats."""

    def __init__(self, settings: SchedulerSettings, desk: Desk, metrics: Metrics) -> None:
        super().__init__()
        self._settings = settings
        self._desk = desk
        self._metrics = metrics
        self._has_room = asyncio.Event()
        metrics.gauge_of("placement_waiting", lambda: desk.num_waiting)

    async def start(self) -> None:
        """Begin to try waiting requests again."""
        self.spawn(self._pump_forever, "pump")

    @handles(Place)
    async def place(self, request: Place, context: Context) -> Placed:
        """Answer with a worker; refuse with Overloaded past the bound."""
        began_s = monotonic_s()
        try:
            self._refuse_if_asleep(request.model)
            ticket = await self._desk.arrive(request, began_s)
            try:
                placed = ticket.placed or await self._wait(ticket, context)
            finally:
                self._desk.leave(ticket)
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

    def _count(self, outcome: str) -> None:
        self._metrics.counter("placements", outcome=outcome).inc()

    def on_beat(self, beat: Heartbeat) -> None:
        """A worker's beat may show room."""
        if beat.load is not None and self._desk.num_waiting:
            self._has_room.set()

    async def _wait(self, ticket: Ticket, context: Context) -> Placed:
        self._has_room.set()  # the pump sleeps for as long as nobody waits
        with span("queue"):
            while ticket.placed is None:
                self._refuse_if_asleep(ticket.request.model)
                self._give_up_without_workers(ticket)
                await context.interim(Queued(position=self._desk.position(ticket)))
                await _set_within(ticket.woken, self._settings.keepalive_s)
            return ticket.placed

    def _give_up_without_workers(self, ticket: Ticket) -> None:
        waited_s = monotonic_s() - ticket.waiting_since
        model = ticket.request.model
        if waited_s >= self._settings.worker_wait_s and not self._desk.has_workers(model):
            raise Unavailable(f"no live worker serves {model!r}", retry_after_s=1.0)

    def _refuse_if_asleep(self, model: ModelName) -> None:
        if self._desk.is_asleep(model):
            retry_after_s = self._settings.asleep_retry_after_s
            raise Asleep(f"every worker of {model!r} sleeps", retry_after_s=retry_after_s)

    async def _pump_forever(self) -> None:
        while True:
            is_idle = not self._desk.num_waiting
            await _set_within(self._has_room, None if is_idle else self._settings.retry_interval_s)
            self._has_room.clear()
            if self._desk.num_waiting:
                began_s = monotonic_s()
                await self._desk.pump(began_s)
                # With many tenants and workers a try takes milliseconds; each beat asks for one.
                await asyncio.sleep(monotonic_s() - began_s)


async def _set_within(waker: asyncio.Event, seconds: float | None) -> None:
    try:
        async with asyncio.timeout(seconds):
            await waker.wait()
    except TimeoutError:
        return
