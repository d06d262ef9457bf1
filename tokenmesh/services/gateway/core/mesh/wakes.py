"""ModelWakes: lets a scheduler wake a model on demand when a request needs it."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.calls import CallSettings
from tokenmesh.shared.errors import Asleep, DeadlineExceeded, TokenMeshError
from tokenmesh.shared.ids import ModelName, RequestId, WorkerId
from tokenmesh.shared.membership import Members
from tokenmesh.shared.messages import Message, Wake, WakeUp
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.subjects import worker_control
from tokenmesh.shared.telemetry import REQUEST_ID, span

_RETRY_AFTER_S: Final = 1.0

AskScheduler = Callable[[Wake, float], Awaitable[Message]]
"""Returns the scheduler's answer until a deadline; raises its error."""


class ModelWakes:
    """Asks once for a model at a time, however many requests wait for it."""

    def __init__(
        self,
        bus: Bus,
        members: Members,
        settings: CallSettings,
        metrics: Metrics,
        ask: AskScheduler,
    ) -> None:
        self._bus = bus
        self._members = members
        self._settings = settings
        self._metrics = metrics
        self._ask = ask
        self._wakes: dict[ModelName, asyncio.Task[None]] = {}

    def is_on_demand(self, model: ModelName) -> bool:
        """Return whether a live worker of the model is woken by requests."""
        members = self._members.workers(model)
        return any(card.on_demand for each in members for card in each.beat.models)

    async def wake(self, model: ModelName, request_id: RequestId, deadline_s: float) -> None:
        """Return when a worker of the model is awake.

        Raises Asleep, with the reason and the time after which to retry, when it cannot be woken or
        takes longer than `wake_timeout_s` or until `deadline_s`. The wake itself goes on when the
        request is cancelled.
        """
        attributes: dict[str, str | int] = {REQUEST_ID: request_id, "tokenmesh.model": model}
        with span("wake", attributes) as current:
            task = self._wakes.get(model)
            current.set_attribute("tokenmesh.joined", task is not None)
            if task is None:
                task = asyncio.create_task(self._wake(model, request_id), name=f"wake {model}")
                self._wakes[model] = task
                task.add_done_callback(partial(self._end, model))
            left_s = min(self._settings.wake_timeout_s, max(0.0, deadline_s - now_s()))
            done, _ = await asyncio.wait((task,), timeout=left_s)
            if not done:
                raise Asleep(
                    f"the model {model!r} is still waking up", retry_after_s=_RETRY_AFTER_S
                )
            if (error := task.exception()) is not None:
                raise _asleep(model, error)

    async def set_keep_alive(self, model: ModelName, seconds: float) -> None:
        """Change the keep-alive of the workers that are awake, from now on; negative: for ever.

        With 0 they sleep as soon as they have no streams. Raises the first error.
        """
        message = WakeUp(tags=[], keep_alive_s=seconds)
        deadline_s = now_s() + self._settings.admin_timeout_s
        awake = [
            each.beat.instance_id
            for each in self._members.workers(model)
            if not each.beat.draining and (each.beat.load is None or not each.beat.load.sleep_level)
        ]
        subjects = [worker_control(WorkerId(each)) for each in awake]
        await asyncio.gather(
            *(self._bus.request(each, message, deadline_s=deadline_s) for each in subjects)
        )

    def _end(self, model: ModelName, task: asyncio.Task[None]) -> None:
        del self._wakes[model]
        if not task.cancelled():
            # Requests that still wait raise it; without one asyncio would log it.
            task.exception()

    async def _wake(self, model: ModelName, request_id: RequestId) -> None:
        began_s, outcome = monotonic_s(), "failed"
        try:
            deadline_s = now_s() + self._settings.wake_timeout_s
            await self._ask(Wake(request_id=request_id, model=model), deadline_s)
            outcome = "awake"
            seconds = monotonic_s() - began_s
            self._metrics.histogram("wake_seconds", model_name=model).observe(seconds)
        finally:
            self._metrics.counter("wakes", model_name=model, outcome=outcome).inc()


def _asleep(model: ModelName, error: BaseException) -> Asleep:
    """An error of its own for each request that waited."""
    if isinstance(error, Asleep):
        return Asleep(error.message, retry_after_s=error.retry_after_s)
    if isinstance(error, DeadlineExceeded):
        reason = "it took too long"
    else:
        reason = error.message if isinstance(error, TokenMeshError) else "internal error"
    return Asleep(f"the model {model!r} could not be woken: {reason}", retry_after_s=_RETRY_AFTER_S)
