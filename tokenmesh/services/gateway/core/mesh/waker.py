"""Waker: wakes the workers of a model on demand when a request needs one.

Workers put themselves to sleep. Where the memory that they share is taken, the one that was idle
for the longest is put to sleep first; one with streams never is.
"""

import asyncio
import logging
from functools import partial
from typing import Final, get_args

from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import Asleep, Overloaded, TokenMeshError, Unavailable
from tokenmesh.shared.ids import InstanceId, ModelName, RequestId, WorkerId
from tokenmesh.shared.membership import Member, Members
from tokenmesh.shared.messages import Message, Sleep, WakeUp, Woken
from tokenmesh.shared.messages.beat import ModelCard, WorkerLoad
from tokenmesh.shared.messages.control import WakeTag
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.subjects import worker_control
from tokenmesh.shared.telemetry import REQUEST_ID, span

logger = logging.getLogger(__name__)

_WORKER: Final = "worker"
_LEVEL: Final = 2
_POLL_S: Final = 0.1
"""How often workers that have died, and room in memory, are looked for."""
_ROOM_S: Final = 1.0
"""After so long a worker is commanded again to wake."""
_RETRY_AFTER_S: Final = 1.0
_ALL_TAGS: Final[list[WakeTag]] = list(get_args(WakeTag))

_Process = tuple[InstanceId, int]
"""A worker and its epoch."""
_Commands = dict[_Process, asyncio.Task[Message]]


class Waker:
    """At most one wake of a model at a time, however many requests wait for it."""

    def __init__(
        self, bus: Bus, members: Members, settings: GatewaySettings, metrics: Metrics
    ) -> None:
        self._bus = bus
        self._members = members
        self._settings = settings
        self._metrics = metrics
        self._wakes: dict[ModelName, asyncio.Task[None]] = {}
        self._failures: dict[ModelName, tuple[str, float]] = {}
        """The reason, and until when it is the answer; of models that have workers."""

    def is_on_demand(self, model: ModelName) -> bool:
        """Whether a live worker of the model is woken by requests."""
        return any(map(_card, self._members.workers(model)))

    async def wake(self, model: ModelName, request_id: RequestId, deadline_s: float) -> None:
        """Return when a worker of the model is awake.

        Raises Asleep, with the reason and the time after which to retry, when it cannot be woken or
        takes longer than `wake_timeout_s` or until `deadline_s`. The wake itself goes on when the
        request is cancelled.
        """
        attributes: dict[str, str | int] = {REQUEST_ID: request_id, "tokenmesh.model": model}
        with span("wake", attributes) as current:
            self._raise_known_failure(model)
            task = self._wakes.get(model)
            current.set_attribute("tokenmesh.joined", task is not None)
            if task is None:
                task = asyncio.create_task(self._wake(model), name=f"wake {model}")
                self._wakes[model] = task
                task.add_done_callback(partial(self._end, model))
            left_s = min(self._settings.wake_timeout_s, max(0.0, deadline_s - now_s()))
            done, _ = await asyncio.wait((task,), timeout=left_s)
            if not done:
                raise Asleep(
                    f"the model {model!r} is still waking up", retry_after_s=_RETRY_AFTER_S
                )
            if (error := task.exception()) is not None:
                raise self._failed(model, _reason(error))

    async def set_keep_alive(self, model: ModelName, seconds: float) -> None:
        """Change the keep-alive of the workers that are awake, from now on; negative: for ever.

        With 0 they sleep as soon as they have no streams. Raises the first error.
        """
        message = WakeUp(tags=[], keep_alive_s=seconds)
        deadline_s = now_s() + self._settings.admin_timeout_s
        awake = [each for each in self._members.workers(model) if _is_awake(each)]
        subjects = [worker_control(WorkerId(each.beat.instance_id)) for each in awake]
        await asyncio.gather(
            *(self._bus.request(each, message, deadline_s=deadline_s) for each in subjects)
        )

    def _raise_known_failure(self, model: ModelName) -> None:
        reason, until_s = self._failures.get(model, ("", 0.0))
        if until_s <= monotonic_s():
            self._failures.pop(model, None)
        else:
            raise self._failed(model, reason, until_s - monotonic_s())

    def _failed(self, model: ModelName, reason: str, wait_s: float | None = None) -> Asleep:
        wait_s = self._settings.wake_failure_s if wait_s is None else wait_s
        return Asleep(
            f"the model {model!r} could not be woken: {reason}",
            retry_after_s=max(_RETRY_AFTER_S, wait_s),
        )

    def _end(self, model: ModelName, task: asyncio.Task[None]) -> None:
        del self._wakes[model]
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._failures[model] = _reason(error), monotonic_s() + self._settings.wake_failure_s
        is_bug = not isinstance(error, TokenMeshError | TimeoutError)
        logger.warning(
            "%s could not be woken: %s", model, _reason(error), exc_info=error if is_bug else None
        )

    async def _wake(self, model: ModelName) -> None:
        began_s, outcome = monotonic_s(), "failed"
        try:
            async with asyncio.timeout(self._settings.wake_timeout_s):
                await self._until_awake(model)
            outcome = "awake"
            seconds = monotonic_s() - began_s
            self._metrics.histogram("wake_seconds", model_name=model).observe(seconds)
            logger.info("%s woke up in %.2f s", model, seconds)
        finally:
            self._metrics.counter("wakes", model_name=model, outcome=outcome).inc()

    async def _until_awake(self, model: ModelName) -> None:
        """Raises the error of a worker when none is left that may wake."""
        commands: _Commands = {}
        try:
            while not any(map(_is_awake, self._members.workers(model))):
                self._command(model, commands)
                if commands:
                    waiting = commands.values()
                    await asyncio.wait(
                        waiting, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED
                    )
                else:
                    # a worker that has died is started again by its supervisor
                    await asyncio.sleep(_POLL_S)
                if await self._has_woken(model, commands):
                    return
        finally:
            for task in commands.values():
                task.cancel()

    def _command(self, model: ModelName, commands: _Commands) -> None:
        """Send the command to workers that lack it, and drop it for those that have died."""
        alive = {
            (each.beat.instance_id, each.beat.epoch)
            for each in self._members.workers(model)
            if not each.beat.draining
        }
        for gone in commands.keys() - alive:
            commands.pop(gone).cancel()
        deadline_s = now_s() + self._settings.wake_timeout_s
        for process in alive - commands.keys():
            subject = worker_control(WorkerId(process[0]))
            request = self._bus.request(subject, WakeUp(tags=_ALL_TAGS), deadline_s=deadline_s)
            commands[process] = asyncio.create_task(request)

    async def _has_woken(self, model: ModelName, commands: _Commands) -> bool:
        """Whether a worker is awake; commands that may be repeated are dropped.

        Raises the error when every command has failed with one that lasts.
        """
        lasting: list[BaseException] = []
        is_short = False
        for process, task in list(commands.items()):
            if not task.done():
                continue
            error = task.exception()
            if error is None:
                answer = task.result()
                if isinstance(answer, Woken) and answer.level == 0:
                    return True
                del commands[process]
            elif isinstance(error, Overloaded) or type(error) is Unavailable:
                # no slot, or no memory
                is_freed = await self._make_room(model)
                if is_freed or isinstance(error, Overloaded):
                    del commands[process]
                    is_short = is_short or not is_freed
                else:
                    lasting.append(error)
            elif isinstance(error, TokenMeshError) and error.retryable:
                del commands[process]
            else:
                lasting.append(error)
        if lasting and len(lasting) == len(commands):
            raise lasting[0]
        if is_short:
            await self._wait_for_room(model)
        return False

    async def _wait_for_room(self, model: ModelName) -> None:
        """Return when a worker sleeps that had a slot, or soon: one may have gone unseen."""
        before = {each.beat.instance_id for each in self._sharing(model)}
        until_s = monotonic_s() + _ROOM_S
        while monotonic_s() < until_s:
            await asyncio.sleep(_POLL_S)
            if before - {each.beat.instance_id for each in self._sharing(model)}:
                return
            if await self._make_room(model):
                return

    async def _make_room(self, model: ModelName) -> bool:
        """Put the worker to sleep that was idle for the longest; False: none is idle."""
        for each in sorted(self._sharing(model), key=lambda each: -_load(each).idle_s):
            if _is_idle(each) and await self._put_to_sleep(each):
                logger.info("put %s to sleep to make room for %s", each.beat.instance_id, model)
                return True
        return False

    def _sharing(self, model: ModelName) -> list[Member]:
        """Workers of other models that hold slots which those of the model share.

        Without slots nothing says that they are on the same machine.
        """
        own = {card.slots for each in self._members.workers(model) if (card := _card(each))} - {""}
        return [
            each
            for each in self._members.service(_WORKER)
            if (card := _card(each)) is not None
            and card.slots in own
            and card.name != model
            and _load(each).sleep_level < _LEVEL
            and not each.beat.draining
        ]

    async def _put_to_sleep(self, member: Member) -> bool:
        """Whether an idle worker sleeps now."""
        subject = worker_control(WorkerId(member.beat.instance_id))
        deadline_s = now_s() + self._settings.admin_timeout_s
        try:
            command = Sleep(level=_LEVEL, mode="idle")
            await self._bus.request(subject, command, deadline_s=deadline_s)
        except TokenMeshError as error:
            logger.info("%s stays awake: %s", member.beat.instance_id, error.message)
            return False
        return True


def _card(member: Member) -> ModelCard | None:
    """The card of the member's model on demand."""
    return next((card for card in member.beat.models if card.on_demand), None)


def _load(member: Member) -> WorkerLoad:
    return member.beat.load or WorkerLoad()


def _is_awake(member: Member) -> bool:
    return not member.beat.draining and _load(member).sleep_level == 0


def _is_idle(member: Member) -> bool:
    load = _load(member)
    return not load.running and not load.waiting


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it took too long"
    return error.message if isinstance(error, TokenMeshError) else "internal error"
