"""Adapters: commands that load and unload LoRA adapters on all workers of a model."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tokenmesh.services.gateway.core.http.errors import invalid
from tokenmesh.services.gateway.core.mesh.catalog import Catalog
from tokenmesh.services.gateway.core.operations.commands import AdapterCommands
from tokenmesh.shared.adapter_registry import AdapterRecord, AdapterRegistry
from tokenmesh.shared.clock import monotonic_s, wall_s
from tokenmesh.shared.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    Overloaded,
    TokenMeshError,
    Unavailable,
    UnknownModel,
)
from tokenmesh.shared.ids import ModelName, WorkerId
from tokenmesh.shared.membership import Member
from tokenmesh.shared.messages import (
    AdapterLoaded,
    LoadAdapter,
    Message,
    UnloadAdapter,
)
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.redis import Redis

logger = logging.getLogger(__name__)

_MAX_UNKNOWN: Final = 1024
_UNKNOWN_S: Final = 5.0
"""It says how long a name that no worker could resolve is not tried again."""
_MAX_RESOLVING: Final = 4
_NOT_RECORDED: Final = (
    "the adapter is loaded, but Redis is away: workers that join before it is back will not have it"
)


@dataclass(slots=True)
class Adapters:
    """A command is answered when every worker has carried it out, and heartbeats show it."""

    commands: AdapterCommands
    catalog: Catalog
    redis: Redis | None
    clock: Callable[[], float] = monotonic_s
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _version: int = 0
    _unknown: OrderedDict[str, float] = field(default_factory=OrderedDict)
    _resolving: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def load(self, name: str, path: str, *, in_place: bool, model: str | None) -> list[str]:
        """Load on every worker of a model; warnings for the client.

        Raises the first worker's error; then no worker has the adapter that did not before.
        """
        if not path:
            raise invalid("lora_path", "is empty")
        card = self._base(model)
        self._check_name(name)
        async with self._turn:
            return await self._load(card, name, path, in_place=in_place)

    async def _load(self, card: ModelCard, name: str, path: str, *, in_place: bool) -> list[str]:
        before = await self._recorded(card.name, name)
        # without a record it is of the settings of workers, which no command may take away
        is_static = before is None and name in {a.name for a in self.catalog.adapters(card)}
        version = self._next_version()
        message = LoadAdapter(name=name, path=path, in_place=in_place, version=version)
        answers = await self.commands.send(card.name, message)
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
            await self._undo(card.name, name, loaded, before, is_static=is_static)
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
        await self.commands.wait(loaded, lambda beat: _has(beat, name, content_hash))
        return warnings

    async def unload(self, name: str, model: str | None) -> None:
        """Raises NotFound where no worker has it."""
        found = self.catalog.find(name if model is None else model)
        names = {each.name for each in self.catalog.adapters(found)}
        if name not in names:
            raise NotFound(f"The lora adapter '{name}' cannot be found.", param="lora_name")
        async with self._turn:
            version = self._next_version()
            record = AdapterRecord(version=version, is_unloaded=True)
            # first, so that a worker that joins now does not load it again
            await self._record(found.name, name, record)
            answers = await self.commands.send(
                found.name, UnloadAdapter(name=name, version=version)
            )
            errors = {w: each for w, each in answers.items() if isinstance(each, TokenMeshError)}
            if errors:
                raise _joined(errors, len(answers))
            await self.commands.wait(answers, lambda beat: not _has(beat, name))

    async def resolve(self, name: str) -> None:
        """Load an unknown name from the directories of workers that have one.

        Raises UnknownModel where there is none; Overloaded while too many names are looked for.
        """
        unknown = UnknownModel(f"The model `{name}` does not exist.", param="model")
        if not self.catalog.resolvers() or self.clock() < self._unknown.get(name, 0.0):
            raise unknown
        task = self._resolving.get(name)
        if task is None:
            if len(self._resolving) >= _MAX_RESOLVING:
                raise Overloaded("too many unknown models are being looked up", retry_after_s=1.0)
            task = asyncio.create_task(self._resolve(name))
            self._resolving[name] = task
            task.add_done_callback(lambda _: self._resolving.pop(name, None))
        try:
            await asyncio.shield(task)
        except NotFound:
            raise unknown from None

    async def _resolve(self, name: str) -> None:
        refusal: TokenMeshError | None = None
        for card in self.catalog.resolvers():
            try:
                async with self._turn:
                    await self._load(card, name, "", in_place=False)
            except NotFound:
                continue
            except (InvalidInput, Unavailable) as error:
                # made for another model, perhaps
                refusal = refusal or error
                continue
            return
        if refusal is not None:
            raise refusal
        self._unknown[name] = self.clock() + _UNKNOWN_S
        self._unknown.move_to_end(name)
        while len(self._unknown) > _MAX_UNKNOWN:
            self._unknown.popitem(last=False)
        raise NotFound(f"no worker has the adapter {name!r}", param="model")

    def _base(self, model: str | None) -> ModelCard:
        card = self.catalog.find(model)
        if card.adapter is not None:
            raise invalid("model", f"{model!r} is an adapter, not a model")
        return card

    def _check_name(self, name: str) -> None:
        try:
            card = self.catalog.find(name)
        except TokenMeshError:
            return
        if card.adapter is None:
            raise Conflict(f"{name!r} is the name of a model", param="lora_name")

    async def _undo(
        self,
        model: ModelName,
        name: str,
        loaded: dict[WorkerId, AdapterLoaded],
        before: AdapterRecord | None,
        *,
        is_static: bool,
    ) -> None:
        """Bring back what the name stood for before a load. Errors are logged.

        It is a later command than the load: workers may have recorded that one already.
        """
        new = [worker for worker, each in loaded.items() if not each.was_there]
        if not new:
            return
        version = self._next_version()
        if before is None or before.is_unloaded:
            record = AdapterRecord(version=version, is_unloaded=True)
            message: Message = UnloadAdapter(name=name, version=version)
        else:
            record = msgspec.structs.replace(before, version=version)
            message = LoadAdapter(name=name, path=before.path, in_place=True, version=version)
        if not is_static:
            await self._record(model, name, record)
        answers = await self.commands.send_to(new, message)
        for worker, answer in answers.items():
            if isinstance(answer, TokenMeshError):
                logger.warning("%s keeps the adapter %s: %s", worker, name, answer.message)
        undone = {w: a for w, a in answers.items() if not isinstance(a, TokenMeshError)}
        with suppress(Unavailable):
            await self.commands.wait(
                undone,
                lambda beat: _has(beat, name, record.content_hash) != record.is_unloaded,
            )

    def _next_version(self) -> int:
        self._version = max(self._version + 1, int(wall_s() * 1000))
        return self._version

    async def _recorded(self, model: ModelName, name: str) -> AdapterRecord | None:
        if self.redis is None:
            return None
        try:
            return (await AdapterRegistry(self.redis, model).read()).get(name)
        except TokenMeshError:
            return None

    async def _record(self, model: ModelName, name: str, record: AdapterRecord) -> list[str]:
        if self.redis is None:
            return []
        try:
            await AdapterRegistry(self.redis, model).write(name, record)
        except TokenMeshError as error:
            logger.warning("cannot record the adapter %s: %s", name, error.message)
            return [_NOT_RECORDED]
        return []


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
