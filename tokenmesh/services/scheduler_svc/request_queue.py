"""RequestQueue: places a request now, queues it, or refuses it. Has no clock.

Each model has a queue in which tenants take turns. A request never overtakes an earlier one of the
same tenant and priority, except one that waits only because of its large `n`. When no worker has
room for a tenant, one may still have room for a tenant below its share. One task at a time places
from a queue, since a placement queries the prefix index.
"""

from collections.abc import Callable
from typing import Final

from tokenmesh.services.scheduler_svc.model_queue import ModelQueue, WaitingRequest
from tokenmesh.services.scheduler_svc.placement import Decision, Placer, Worker
from tokenmesh.shared.config.placement import SchedulerSettings
from tokenmesh.shared.errors import Overloaded
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.messages.place import Place, Placed

MAX_RETRY_AFTER_S: Final = 60.0
"""Longest Retry-After of a full queue."""

WorkersOf = Callable[[ModelName], list[Worker]]

UNBOUND_TENANTS: Final = ("", "default")
"""Tenants of a mesh without API keys: only the bound of the whole queue applies to them."""


class RequestQueue:
    """The requests that this scheduler has not placed yet."""

    def __init__(
        self, settings: SchedulerSettings, workers_of: WorkersOf, placement: Placer
    ) -> None:
        self._settings = settings
        self._workers_of = workers_of
        self._placement = placement
        self._queues: dict[ModelName, ModelQueue] = {}

    @property
    def num_waiting(self) -> int:
        """Requests of all models that were tried at least once and found no room."""
        return sum(queue.num_waiting for queue in self._queues.values())

    async def submit(self, request: Place, now: float) -> WaitingRequest:
        """Add a request; `placed` is set if a worker has room now. Raises Overloaded."""
        queue = self._queues.setdefault(request.model, ModelQueue(self._settings))
        waiting = queue.add(request, now)
        try:
            async with queue.lock:
                if waiting.placed is None:
                    await self._place_in_order(queue, now)
        except BaseException:
            self.remove(waiting)
            raise
        if waiting.placed is None:
            self._check_bounds(queue, waiting, now)
        waiting.was_tried = waiting.placed is None
        return waiting

    def _check_bounds(self, queue: ModelQueue, waiting: WaitingRequest, now: float) -> None:
        """Remove the request and raise Overloaded when too many wait before it.

        Retry-After is the time until those requests are placed, as they keep the workers busy.
        """
        tenant, settings = waiting.request.tenant, self._settings
        of_tenant = sum(each.num_waiting_of(tenant) for each in self._queues.values())
        if self.num_waiting >= settings.max_queued:
            what = f"{settings.max_queued} requests already wait for a worker"
        elif tenant not in UNBOUND_TENANTS and of_tenant >= settings.max_queued_per_tenant:
            what = f"{settings.max_queued_per_tenant} requests of the tenant {tenant} already wait"
        else:
            return
        queue_s = queue.departures.wait_s(queue.position(waiting), now)
        self.remove(waiting)
        worker_s = self._placement.retry_after_s(
            waiting.request, self._workers_of(waiting.request.model)
        )
        raise Overloaded(what, retry_after_s=max(min(MAX_RETRY_AFTER_S, queue_s), worker_s))

    def remove(self, waiting: WaitingRequest) -> None:
        """Remove a request that is placed or whose client has left; no error if already removed."""
        queue = self._queues.get(waiting.request.model)
        if queue is not None:
            queue.remove(waiting)
            if not len(queue):
                del self._queues[waiting.request.model]

    def position(self, waiting: WaitingRequest) -> int:
        """About how many requests are placed before this one."""
        queue = self._queues.get(waiting.request.model)
        return queue.position(waiting) if queue is not None else 0

    def has_workers(self, request: Place) -> bool:
        """Return whether a live worker of the model, and with the adapter, accepts streams."""
        return any(
            worker.accepts_streams and (request.lora is None or worker.adapter(request) is not None)
            for worker in self._workers_of(request.model)
        )

    def is_asleep(self, model: ModelName) -> bool:
        """Return whether all workers of the model sleep, draining ones not counted."""
        staying = [worker for worker in self._workers_of(model) if not worker.draining]
        return bool(staying) and not any(worker.accepts_streams for worker in staying)

    async def place_waiting(self, now: float) -> None:
        """Place all requests for which there is room; their `placed` is set."""
        for queue in list(self._queues.values()):
            async with queue.lock:
                await self._place_in_order(queue, now)

    async def _place_in_order(self, queue: ModelQueue, now: float) -> None:
        passed: set[WaitingRequest] = set()
        full: set[str] = set()
        last_group = None
        while (waiting := queue.next(passed, full)) is not None:
            if last_group is not None and waiting.entry.group > last_group:
                break
            workers = self._workers_of(waiting.request.model)
            decision = await self._placement.place(waiting.request, workers, now)
            if decision.worker is not None:
                waiting.set_placed(
                    _placed(decision, decision.worker, max(0.0, now - waiting.since_s))
                )
                queue.take(waiting)
                self.remove(waiting)
                if waiting.was_tried:
                    queue.departures.record(now)
            elif waiting.request.num_streams == 1 and waiting.request.lora is None:
                full.add(waiting.entry.tenant)
                last_group = waiting.entry.group
            else:
                passed.add(waiting)


def _placed(decision: Decision, worker: Worker, queued_s: float) -> Placed:
    return Placed(
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        queued_s=queued_s,
        candidates=decision.candidates,
        reason=decision.reason,
        reservation=decision.reservation,
        kv=decision.kv,
    )
