"""AdapterCommands: a command about adapters for every worker of a model."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.gateway import GatewaySettings
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
from tokenmesh.shared.subjects import worker_adapters

_POLL_S: Final = 0.01
_LOOK_S: Final = 0.05
"""How often a worker that has not answered is looked for among the members."""

Answers = Mapping[WorkerId, Message | TokenMeshError]


class _Dead(Unavailable):
    """The worker died while it carried out a command."""


class AdapterCommands:
    """Sends to all at once, within a deadline."""

    def __init__(self, bus: Bus, members: Members, settings: GatewaySettings) -> None:
        self._bus = bus
        self._members = members
        self._timeout_s = settings.admin_timeout_s

    async def send(self, model: ModelName, message: Message) -> Answers:
        """Every worker's answer or error; workers that have died meanwhile are left out.

        Raises Unavailable where no worker is left, InvalidInput where one takes no adapters.
        """
        members = [each for each in self._members.workers(model) if not each.beat.draining]
        if not members:
            raise Unavailable(f"no worker serves the model {model!r}", retry_after_s=1.0)
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
        names = [InstanceId(each) for each in workers]
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    members = [self._members.get(each) for each in names]
                    if all(each is None or is_shown(each) for each in members):
                        return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise Unavailable("the workers' heartbeats do not show it yet") from error


def _takes_adapters(member: Member) -> bool:
    return all(card.takes_adapters for card in member.beat.models)
