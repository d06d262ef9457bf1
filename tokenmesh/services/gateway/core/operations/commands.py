"""Commands to all workers of a model: about adapters, and to sleep, wake up and profile."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from tokenmesh.services.gateway.core.mesh.catalog import Catalog
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.calls import CallSettings
from tokenmesh.shared.errors import (
    InvalidInput,
    NoResponders,
    ProtocolError,
    TokenMeshError,
    Unavailable,
)
from tokenmesh.shared.ids import InstanceId, ModelName, WorkerId
from tokenmesh.shared.membership import Member, Members
from tokenmesh.shared.messages import AdapterLoaded, AdapterUnloaded, Message
from tokenmesh.shared.subjects import worker_adapters, worker_control

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.01
_LOOK_S: Final = 0.05
"""It says how often a worker that has not answered is looked for among the members."""

_Answer = TypeVar("_Answer")
Answers = Mapping[WorkerId, Message | TokenMeshError]


class _Dead(Unavailable):
    """The worker died while it carried out a command."""


class AdapterCommands:
    """Sends to all at once, within a deadline."""

    def __init__(self, bus: Bus, members: Members, settings: CallSettings) -> None:
        self._bus = bus
        self._members = members
        self._timeout_s = settings.admin_timeout_s

    async def send(self, model: ModelName, message: Message) -> Answers:
        """Every worker's answer or error; workers that have died meanwhile are left out.

        Raises Unavailable where no worker is left, InvalidInput where one takes no adapters.
        """
        members = _serving(self._members, model)
        without = [each.beat.instance_id for each in members if not _takes_adapters(each)]
        if without:
            what = f"{min(without)} serves no adapters: --enable-lora is off"
            raise InvalidInput(what, param="lora_name")
        answers = await self.send_to([WorkerId(each.beat.instance_id) for each in members], message)
        # a worker that has died is not a failure: it gets the adapter when it is back
        alive = {w: each for w, each in answers.items() if not isinstance(each, _Dead)}
        if not alive:
            raise Unavailable("all workers have died meanwhile", retry_after_s=1.0)
        return alive

    async def send_to(self, workers: Iterable[WorkerId], message: Message) -> Answers:
        """The answer or error of each of some workers."""
        workers, deadline_s = list(workers), now_s() + self._timeout_s
        found = await asyncio.gather(
            *(self._request(each, message, deadline_s) for each in workers)
        )
        return dict(zip(workers, found, strict=True))

    async def _request(
        self, worker: WorkerId, message: Message, deadline_s: float
    ) -> Message | TokenMeshError:
        """The answer, or the error; `_Dead` as soon as the worker is not the one it was."""
        request = asyncio.create_task(
            self._bus.request(worker_adapters(worker), message, deadline_s=deadline_s)
        )
        epoch = self._epoch_of(worker)
        try:
            while not request.done():
                await asyncio.wait({request}, timeout=_LOOK_S)
                if self._epoch_of(worker) != epoch:
                    return _Dead(f"{worker} has died")
            answer = request.result()
        except NoResponders:
            # a process that died is among the members until it has missed its heartbeats
            return _Dead(f"{worker} has died")
        except TokenMeshError as error:
            return error
        finally:
            request.cancel()
        if isinstance(answer, AdapterLoaded | AdapterUnloaded):
            return answer
        return ProtocolError(f"the answer is {type(answer).__name__}")

    def _epoch_of(self, worker: WorkerId) -> int | None:
        member = self._members.get(InstanceId(worker))
        return None if member is None else member.beat.epoch

    async def wait(self, workers: Iterable[WorkerId], is_shown: Callable[[Member], bool]) -> None:
        """Until heartbeats show it, since requests are placed by them. Raises Unavailable."""
        await _wait_shown(self._members, workers, is_shown, self._timeout_s)


def _takes_adapters(member: Member) -> bool:
    return all(card.takes_adapters for card in member.beat.models)


@dataclass(slots=True)
class Admin:
    bus: Bus
    members: Members
    catalog: Catalog
    settings: CallSettings

    def sleep_levels(self, model: str | None) -> dict[WorkerId, int]:
        """From the last heartbeats of a model's workers that are not draining; 0 is awake.

        Raises UnknownModel, or Unavailable if there are none.
        """
        return {_id(member): _level(member) for member in self._workers(model)}

    async def command(
        self, model: str | None, command: Message, expected: type[_Answer]
    ) -> dict[WorkerId, _Answer]:
        """Every worker's answer. Raises the error of the first worker that failed.

        Commands are idempotent: after an error the caller can send the same one again.
        """
        workers = [_id(member) for member in self._workers(model)]
        name = type(command).__name__
        logger.info("sending %s to %s", name, ", ".join(workers))
        deadline_s = now_s() + self.settings.admin_timeout_s
        answers = await asyncio.gather(
            *(
                self.bus.request(worker_control(each), command, deadline_s=deadline_s)
                for each in workers
            ),
            return_exceptions=True,
        )
        done: dict[WorkerId, _Answer] = {}
        errors: list[TokenMeshError] = []
        for worker, answer in zip(workers, answers, strict=True):
            if isinstance(answer, expected):
                done[worker] = answer
            else:
                errors.append(_error(worker, answer))
        if errors:
            error = errors[0]
            error.message += f" ({len(done)} of {len(workers)} workers succeeded)"
            logger.warning("%s failed: %s", name, error.message)
            raise error
        return done

    async def wait_for_levels(self, levels: dict[WorkerId, int]) -> None:
        """Wait until heartbeats show these levels, since placement uses heartbeats.

        Raises Unavailable after `admin_timeout_s`.
        """

        def has_level(member: Member) -> bool:
            return _level(member) == levels[_id(member)]

        await _wait_shown(self.members, levels, has_level, self.settings.admin_timeout_s)

    def _workers(self, model: str | None) -> list[Member]:
        members = _serving(self.members, self.catalog.find(model).name)
        return sorted(members, key=lambda each: each.beat.instance_id)


def _id(member: Member) -> WorkerId:
    return WorkerId(member.beat.instance_id)


def _level(member: Member) -> int:
    return member.beat.load.sleep_level if member.beat.load else 0


def _error(worker: WorkerId, answer: object) -> TokenMeshError:
    """The error of one worker, of the same class, prefixed with the worker's id."""
    if isinstance(answer, TokenMeshError):
        return type(answer)(
            f"{worker}: {answer.message}", param=answer.param, retry_after_s=answer.retry_after_s
        )
    if isinstance(answer, Exception):
        raise answer
    return ProtocolError(f"{worker}: the answer is {type(answer).__name__}")


def _serving(members: Members, model: ModelName) -> list[Member]:
    """The workers of a model that are not draining. Raises Unavailable where there are none."""
    found = [each for each in members.workers(model) if not each.beat.draining]
    if not found:
        raise Unavailable(f"no worker serves the model {model!r}", retry_after_s=1.0)
    return found


async def _wait_shown(
    members: Members,
    workers: Iterable[WorkerId],
    is_shown: Callable[[Member], bool],
    timeout_s: float,
) -> None:
    """Wait until heartbeats show it. Workers that have died are left out. Raises Unavailable."""
    names = [InstanceId(each) for each in workers]
    try:
        async with asyncio.timeout(timeout_s):
            # The one listener for heartbeats is the catalog's.
            while True:
                found = [members.get(each) for each in names]
                if all(each is None or is_shown(each) for each in found):
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise Unavailable("the workers' heartbeats do not show it yet") from error
