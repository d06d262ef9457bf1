"""Adapters: commands that load and unload LoRA adapters on all workers of a model."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

from tokenmesh.services.gateway.mesh.catalog import Catalog
from tokenmesh.shared.adapter_registry import AdapterRecord, AdapterRegistry
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import monotonic_s, now_s, wall_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import (
    Conflict,
    InvalidInput,
    NoResponders,
    NotFound,
    Overloaded,
    ProtocolError,
    TokenMeshError,
    Unavailable,
    UnknownModel,
)
from tokenmesh.shared.ids import InstanceId, ModelName, WorkerId
from tokenmesh.shared.membership import Member, Members
from tokenmesh.shared.messages import (
    AdapterLoaded,
    AdapterUnloaded,
    LoadAdapter,
    Message,
    UnloadAdapter,
)
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.redis import Redis
from tokenmesh.shared.subjects import worker_adapters

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.01
_MAX_UNKNOWN: Final = 1024
_UNKNOWN_S: Final = 5.0
"""How long a name that no worker could resolve is not tried again."""
_MAX_RESOLVING: Final = 4
_NOT_RECORDED: Final = (
    "the adapter is loaded, but Redis is away: workers that join before it is back will not have it"
)

_LOOK_S: Final = 0.05
"""How often a worker that has not answered is looked for among the members."""
_DEATH_S: Final = 3.0
"""How long a dead one may be among them."""

Answers = Mapping[WorkerId, Message | TokenMeshError]


class _Dead(Unavailable):
    """The worker died while it carried out a command."""


class Adapters:
    """A command is answered when every worker has carried it out, and heartbeats show it."""

    def __init__(
        self,
        bus: Bus,
        members: Members,
        catalog: Catalog,
        redis: Redis | None,
        settings: GatewaySettings,
        clock: Callable[[], float] = monotonic_s,
    ) -> None:
        self._bus = bus
        self._members = members
        self._catalog = catalog
        self._redis = redis
        self._settings = settings
        self._clock = clock
        self._turn = asyncio.Lock()
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._resolving: dict[str, asyncio.Task[None]] = {}

    async def load(self, name: str, path: str, *, in_place: bool, model: str | None) -> list[str]:
        """Load on every worker of a model; warnings for the client.

        Raises the first worker's error; then no worker has the adapter that did not before.
        """
        if not path:
            raise InvalidInput("lora_path is empty", param="lora_path")
        card = self._base(model)
        self._check_name(name)
        async with self._turn:
            return await self._load(card, name, path, in_place=in_place)

    async def _load(self, card: ModelCard, name: str, path: str, *, in_place: bool) -> list[str]:
        version = int(wall_s() * 1000)
        message = LoadAdapter(name=name, path=path, in_place=in_place, version=version)
        answers = await self._send(card, message)
        loaded = {w: each for w, each in answers.items() if isinstance(each, AdapterLoaded)}
        hashes = {each.card.content_hash for each in loaded.values()}
        errors = {w: each for w, each in answers.items() if isinstance(each, TokenMeshError)}
        if not errors and len(hashes) > 1:
            files = ", ".join(f"{w} {each.card.content_hash}" for w, each in loaded.items())
            error: TokenMeshError = Conflict(
                f"{path} has another content on other machines: {files}", param="lora_path"
            )
            errors = dict.fromkeys(loaded, error)
        if errors:
            await self._undo(card, name, loaded, version)
            raise _joined(errors, len(answers))
        (content_hash,) = hashes
        if not in_place and all(each.was_there for each in loaded.values()):
            raise Conflict(
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True.",
                param="lora_name",
            )
        self._unknown.pop(name, None)
        record = AdapterRecord(version=version, path=path, content_hash=content_hash)
        warnings = await self._record(card.name, name, record)
        await self._wait(loaded, lambda beat: _has(beat, name, content_hash))
        return warnings

    async def unload(self, name: str, model: str | None) -> None:
        """Raises NotFound where no worker has it."""
        found = self._catalog.find(name if model is None else model)
        names = {each.name for each in self._catalog.adapters(found)}
        if name not in names:
            raise NotFound(f"The lora adapter '{name}' cannot be found.", param="lora_name")
        async with self._turn:
            version = int(wall_s() * 1000)
            record = AdapterRecord(version=version, is_unloaded=True)
            # first, so that a worker that joins now does not load it again
            await self._record(found.name, name, record)
            answers = await self._send(found, UnloadAdapter(name=name, version=version))
            errors = {w: each for w, each in answers.items() if isinstance(each, TokenMeshError)}
            if errors:
                raise _joined(errors, len(answers))
            await self._wait(answers, lambda beat: not _has(beat, name))

    async def resolve(self, name: str) -> None:
        """Load an unknown name from the directories of workers that have one.

        Raises UnknownModel where there is none; Overloaded while too many names are looked for.
        """
        unknown = UnknownModel(f"The model `{name}` does not exist.", param="model")
        if not self._catalog.resolvers() or self._clock() < self._unknown.get(name, 0.0):
            raise unknown
        task = self._resolving.get(name)
        if task is None:
            if len(self._resolving) >= _MAX_RESOLVING:
                raise Overloaded("too many unknown models are looked for", retry_after_s=1.0)
            task = asyncio.create_task(self._resolve(name))
            self._resolving[name] = task
            task.add_done_callback(lambda _: self._resolving.pop(name, None))
        try:
            await asyncio.shield(task)
        except NotFound:
            raise unknown from None

    async def _resolve(self, name: str) -> None:
        for card in self._catalog.resolvers():
            try:
                async with self._turn:
                    await self._load(card, name, "", in_place=False)
            except NotFound:
                continue
            return
        self._unknown[name] = self._clock() + _UNKNOWN_S
        self._unknown.move_to_end(name)
        while len(self._unknown) > _MAX_UNKNOWN:
            self._unknown.popitem(last=False)
        raise NotFound(f"no worker has the adapter {name!r}", param="model")

    def _base(self, model: str | None) -> ModelCard:
        card = self._catalog.find(model)
        if card.adapter is not None:
            raise InvalidInput(f"model {model!r} is an adapter, not a model", param="model")
        return card

    def _check_name(self, name: str) -> None:
        try:
            card = self._catalog.find(name)
        except TokenMeshError:
            return
        if card.adapter is None:
            raise Conflict(f"{name!r} is the name of a model", param="lora_name")

    async def _send(self, card: ModelCard, message: Message) -> Answers:
        """Every worker's answer or error; workers that have died meanwhile are left out."""
        members = self._members.workers(card.name)
        workers = [WorkerId(each.beat.instance_id) for each in members if not each.beat.draining]
        if not workers:
            raise Unavailable(f"no worker serves the model {card.name!r}", retry_after_s=1.0)
        deadline_s = now_s() + self._settings.admin_timeout_s
        found = await asyncio.gather(*(self._ask(each, message, deadline_s) for each in workers))
        answers = dict(zip(workers, found, strict=True))
        # a worker that has died is not a failure: it gets the adapter when it is back
        alive = {w: each for w, each in answers.items() if not isinstance(each, _Dead)}
        if not alive:
            raise Unavailable("all workers have died meanwhile", retry_after_s=1.0)
        return alive

    async def _ask(
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
            return await self._reason_of_silence(worker, epoch)
        except TokenMeshError as error:
            return error
        finally:
            request.cancel()
        if isinstance(answer, AdapterLoaded | AdapterUnloaded):
            return answer
        return ProtocolError(f"the answer is {type(answer).__name__}")

    async def _reason_of_silence(self, worker: WorkerId, epoch: int | None) -> TokenMeshError:
        """A process that died is among the members for a moment; one without adapters stays."""
        until_s = self._clock() + _DEATH_S
        while self._clock() < until_s:
            if self._epoch_of(worker) != epoch:
                return _Dead(f"{worker} has died")
            await asyncio.sleep(_LOOK_S)
        return InvalidInput(f"{worker} serves no adapters: --enable-lora is off", param="lora_name")

    def _epoch_of(self, worker: WorkerId) -> int | None:
        member = self._members.get(InstanceId(worker))
        return None if member is None else member.beat.epoch

    async def _undo(
        self, card: ModelCard, name: str, loaded: dict[WorkerId, AdapterLoaded], version: int
    ) -> None:
        """Unload where the command has brought the adapter. Errors are logged."""
        new = [worker for worker, each in loaded.items() if not each.was_there]
        deadline_s = now_s() + self._settings.admin_timeout_s
        message = UnloadAdapter(name=name, version=version)
        answers = await asyncio.gather(*(self._ask(each, message, deadline_s) for each in new))
        for worker, answer in zip(new, answers, strict=True):
            if isinstance(answer, TokenMeshError):
                logger.warning("%s keeps the adapter %s: %s", worker, name, answer.message)

    async def _record(self, model: ModelName, name: str, record: AdapterRecord) -> list[str]:
        if self._redis is None:
            return []
        try:
            await AdapterRegistry(self._redis, model).write(name, record)
        except TokenMeshError as error:
            logger.warning("cannot record the adapter %s: %s", name, error.message)
            return [_NOT_RECORDED]
        return []

    async def _wait(self, workers: Answers, is_shown: Callable[[Member], bool]) -> None:
        """Until heartbeats show it, since requests are placed by them. Raises Unavailable."""
        try:
            async with asyncio.timeout(self._settings.admin_timeout_s):
                while True:
                    members = [self._members.get(InstanceId(worker)) for worker in workers]
                    if all(each is None or is_shown(each) for each in members):
                        return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise Unavailable("the workers' heartbeats do not show it yet") from error


def _has(member: Member, name: str, content_hash: str = "") -> bool:
    cards = [each for card in member.beat.models for each in card.adapters]
    return any(each.name == name and content_hash in ("", each.content_hash) for each in cards)


def _joined(errors: dict[WorkerId, TokenMeshError], num_workers: int) -> TokenMeshError:
    """The first worker's error, with the names of all that failed."""
    error = errors[min(errors)]
    message = error.message
    if num_workers > 1:
        others = ", ".join(sorted(errors))
        message = f"{message} ({len(errors)} of {num_workers} workers failed: {others})"
    return type(error)(message, param=error.param, retry_after_s=error.retry_after_s)
