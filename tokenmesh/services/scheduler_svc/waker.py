"""Waker: wakes the workers of a model on demand when a gateway asks for it.

Workers put themselves to sleep. Where the memory that they share is taken, the one that was idle
for the longest is put to sleep first; one with streams never is. The scheduler that holds the lease
of a group of slots decides for it; another one passes its wakes on and takes over when it dies.
"""

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Final, get_args

from tokenmesh.services.scheduler_svc.wake_leases import WakeLeases
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.placement import SchedulerSettings
from tokenmesh.shared.errors import Asleep, Draining, Overloaded, TokenMeshError, Unavailable
from tokenmesh.shared.ids import InstanceId, ModelName, RequestId, WorkerId
from tokenmesh.shared.membership import Member, Members
from tokenmesh.shared.messages import Awake, Message, Sleep, Wake, WakeUp, Woken
from tokenmesh.shared.messages.beat import ModelCard, WorkerLoad
from tokenmesh.shared.messages.control import WakeTag

logger = logging.getLogger(__name__)

MAX_WAKES: Final = 1024
"""Models that may be waking at a time."""
_WORKER: Final = "worker"
_LEVEL: Final = 2
_POLL_S: Final = 0.1
"""A wake looks so often for workers that have died, and for room in memory."""
_ROOM_S: Final = 1.0
"""After so long a worker is commanded again to wake."""
_SLEEP_S: Final = 30.0
"""An idle worker has so long to give its memory back."""
_MAX_WAKE_S: Final = 3600.0
"""A deadline comes from the bus: a wake ends after so long whatever it says."""
_RETRY_AFTER_S: Final = 1.0
_ALL_TAGS: Final[list[WakeTag]] = list(get_args(WakeTag))


@dataclass(slots=True, eq=False)
class _Wake:
    """The one wake of a model at a time, for all that ask for it."""

    model: ModelName
    request_id: RequestId
    """The first request that asked for it."""
    deadline_s: float
    """The latest of those that asked."""
    seen_s: float
    """When a worker of the model was last alive or starting, monotonic."""


@dataclass(frozen=True, slots=True)
class _Receiver:
    """One life of a worker, or the scheduler that decides for it."""

    subject: str
    epoch: int
    message: WakeUp | Wake = field(compare=False)


_Commands = dict[_Receiver, asyncio.Task[Message]]


class Waker:
    """At most one wake of a model at a time, however many gateways ask for it."""

    def __init__(
        self,
        bus: Bus,
        members: Members,
        settings: SchedulerSettings,
        leases: WakeLeases,
    ) -> None:
        self._bus = bus
        self._members = members
        self._settings = settings
        self._leases = leases
        self._wakes: dict[ModelName, tuple[_Wake, asyncio.Task[None]]] = {}
        self._failures: dict[ModelName, tuple[Asleep, float]] = {}
        """The answer, and until when it is one."""
        self._to_sleep: set[InstanceId] = set()
        """Workers that are being put to sleep for one model make no room for another one."""

    async def wake(self, message: Wake, deadline_s: float) -> Awake:
        """Return when a worker of the model is awake.

        Raises Asleep, with the reason and the time after which to retry, when it cannot be woken
        until the latest deadline of those who ask. A caller that is cancelled does not end the
        wake of others.
        """
        model, began_s = message.model, monotonic_s()
        self._raise_known_failure(model)
        deadline_s = min(deadline_s, now_s() + _MAX_WAKE_S)
        if model not in self._wakes:
            self._begin(_Wake(model, message.request_id, deadline_s, began_s))
        wake, task = self._wakes[model]
        wake.deadline_s = max(wake.deadline_s, deadline_s)
        await asyncio.wait((task,))
        if task.cancelled():
            raise Draining("the scheduler has left")
        if (error := task.exception()) is not None:
            raise _answer(model, error, self._settings.wake_failure_s)
        return Awake(seconds=monotonic_s() - began_s)

    async def stop(self) -> None:
        """End all wakes; another scheduler may decide at once."""
        tasks = [task for _, task in self._wakes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._leases.release()

    def _begin(self, wake: _Wake) -> None:
        if len(self._wakes) >= MAX_WAKES:
            raise Overloaded(
                f"{MAX_WAKES} models are waking up already", retry_after_s=_RETRY_AFTER_S
            )
        task = asyncio.create_task(self._until_awake(wake), name=f"wake {wake.model}")
        self._wakes[wake.model] = wake, task
        task.add_done_callback(partial(self._end, wake.model))

    def _raise_known_failure(self, model: ModelName) -> None:
        error, until_s = self._failures.get(model, (None, 0.0))
        left_s = until_s - monotonic_s()
        if error is None or left_s <= 0:
            self._failures.pop(model, None)
        else:
            raise Asleep(error.message, retry_after_s=max(_RETRY_AFTER_S, left_s))

    def _end(self, model: ModelName, task: asyncio.Task[None]) -> None:
        del self._wakes[model]
        if task.cancelled() or (error := task.exception()) is None:
            return
        now, lasts_s = monotonic_s(), self._settings.wake_failure_s
        self._failures = {name: each for name, each in self._failures.items() if each[1] > now}
        self._failures[model] = _answer(model, error, lasts_s), now + lasts_s
        is_bug = not isinstance(error, TokenMeshError | TimeoutError)
        logger.warning(
            "%s could not be woken: %s", model, _reason(error), exc_info=error if is_bug else None
        )

    async def _until_awake(self, wake: _Wake) -> None:
        """Raises the error of a worker when none is left that may wake, TimeoutError at the end."""
        commands: _Commands = {}
        try:
            while not any(map(_is_awake, self._members.workers(wake.model))):
                if now_s() >= wake.deadline_s:
                    raise TimeoutError
                self._refuse_without_workers(wake)
                self._command(await self._receivers(wake), commands, wake.deadline_s)
                if commands:
                    waiting = commands.values()
                    await asyncio.wait(
                        waiting, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED
                    )
                else:
                    # a worker that has died is started again by its supervisor
                    await asyncio.sleep(_POLL_S)
                if await self._has_woken(wake, commands):
                    return
        finally:
            for task in commands.values():
                task.cancel()

    def _refuse_without_workers(self, wake: _Wake) -> None:
        """Raises Unavailable where the model has had no worker for as long as a placement waits."""
        now = monotonic_s()
        if self._members.workers(wake.model) or self._members.is_starting(_WORKER, wake.model):
            wake.seen_s = now
        elif now - wake.seen_s >= self._settings.worker_wait_s:
            raise Unavailable(f"no live worker serves {wake.model!r}")

    async def _receivers(self, wake: _Wake) -> list[_Receiver]:
        """The workers for which this scheduler decides, else the scheduler that decides for one."""
        workers: list[_Receiver] = []
        others: list[_Receiver] = []
        for each in self._members.workers(wake.model):
            if each.beat.draining:
                continue
            holder = await self._leases.holder(_group(each, wake.model))
            if holder == self._leases.own_id:
                subject = subjects.worker_control(WorkerId(each.beat.instance_id))
                workers.append(_Receiver(subject, each.beat.epoch, WakeUp(tags=_ALL_TAGS)))
            else:
                subject = subjects.replica(subjects.place(wake.model), holder)
                message = Wake(request_id=wake.request_id, model=wake.model, is_passed_on=True)
                others.append(_Receiver(subject, 0, message))
        return workers or others[:1]

    def _command(self, receivers: list[_Receiver], commands: _Commands, deadline_s: float) -> None:
        """Send the command to those that lack it, and drop it for those that have gone."""
        for gone in commands.keys() - set(receivers):
            commands.pop(gone).cancel()
        for each in receivers:
            if each not in commands:
                request = self._bus.request(each.subject, each.message, deadline_s=deadline_s)
                commands[each] = asyncio.create_task(request)

    async def _has_woken(self, wake: _Wake, commands: _Commands) -> bool:
        """Return whether a worker is awake; commands that may be repeated are dropped.

        Raises the error when every command has failed with one that lasts.
        """
        lasting: list[BaseException] = []
        is_short = False
        for receiver, task in list(commands.items()):
            if not task.done():
                continue
            error = task.exception()
            if error is None:
                answer = task.result()
                if isinstance(answer, Awake) or (isinstance(answer, Woken) and answer.level == 0):
                    return True
                del commands[receiver]
            elif isinstance(receiver.message, WakeUp) and _lacks_room(error):
                # no slot, or no memory
                is_freed = await self._make_room(wake)
                if is_freed or isinstance(error, Overloaded):
                    del commands[receiver]
                    is_short = is_short or not is_freed
                else:
                    lasting.append(error)
            elif isinstance(error, TokenMeshError) and error.retryable:
                del commands[receiver]
            else:
                lasting.append(error)
        if lasting and len(lasting) == len(commands):
            raise lasting[0]
        if is_short:
            await self._wait_for_room(wake)
        return False

    async def _wait_for_room(self, wake: _Wake) -> None:
        """Return when a worker sleeps that had a slot, or soon: one may have gone unseen."""
        before = {each.beat.instance_id for each in self._sharing(wake.model)}
        until_s = monotonic_s() + _ROOM_S
        while monotonic_s() < until_s:
            await asyncio.sleep(_POLL_S)
            if before - {each.beat.instance_id for each in self._sharing(wake.model)}:
                return
            if await self._make_room(wake):
                return

    async def _make_room(self, wake: _Wake) -> bool:
        """Put the worker to sleep that was idle for the longest; False: none is idle."""
        for each in sorted(self._sharing(wake.model), key=lambda each: -_load(each).idle_s):
            if _is_idle(each) and await self._put_to_sleep(each, wake.deadline_s):
                logger.info(
                    "put %s to sleep to make room for %s", each.beat.instance_id, wake.model
                )
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

    async def _put_to_sleep(self, member: Member, deadline_s: float) -> bool:
        """Return whether an idle worker sleeps now."""
        worker = member.beat.instance_id
        if worker in self._to_sleep:
            return False
        self._to_sleep.add(worker)
        try:
            command = Sleep(level=_LEVEL, mode="idle")
            await self._bus.request(
                subjects.worker_control(WorkerId(worker)),
                command,
                deadline_s=min(deadline_s, now_s() + _SLEEP_S),
            )
        except TokenMeshError as error:
            logger.info("%s stays awake: %s", worker, error.message)
            return False
        finally:
            self._to_sleep.discard(worker)
        return True


def _card(member: Member) -> ModelCard | None:
    """The card of the member's model on demand."""
    return next((card for card in member.beat.models if card.on_demand), None)


def _group(member: Member, model: ModelName) -> str:
    """Whose workers share memory with this one, as far as one knows."""
    card = _card(member)
    return card.slots if card is not None and card.slots else f"model {model}"


def _load(member: Member) -> WorkerLoad:
    return member.beat.load or WorkerLoad()


def _is_awake(member: Member) -> bool:
    return not member.beat.draining and _load(member).sleep_level == 0


def _is_idle(member: Member) -> bool:
    load = _load(member)
    return not load.running and not load.waiting


def _lacks_room(error: BaseException) -> bool:
    return isinstance(error, Overloaded) or type(error) is Unavailable


def _answer(model: ModelName, error: BaseException, retry_after_s: float) -> Asleep:
    retry_after_s = max(_RETRY_AFTER_S, retry_after_s)
    if isinstance(error, Asleep):
        # of the scheduler that decides
        return Asleep(error.message, retry_after_s=error.retry_after_s or retry_after_s)
    return Asleep(
        f"the model {model!r} could not be woken: {_reason(error)}", retry_after_s=retry_after_s
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it took too long"
    return error.message if isinstance(error, TokenMeshError) else "internal error"
