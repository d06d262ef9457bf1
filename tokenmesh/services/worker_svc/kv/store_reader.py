"""StoreReader: a request waits here until images of its prompt come from stores."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from tokenmesh.engine.kv.exchange import Wanted
from tokenmesh.engine.kv.shared_arena import SharedKv
from tokenmesh.engine.request.request import Request
from tokenmesh.services.worker_svc.kv.asking import ask
from tokenmesh.services.worker_svc.kv.child import BYTES_PER_S, TransferProcess
from tokenmesh.services.worker_svc.kv.orders import MOST_SLOTS
from tokenmesh.services.worker_svc.streams import WorkerStream
from tokenmesh.services.worker_svc.thread import Consult, EngineHost
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.kv import KvSettings
from tokenmesh.shared.errors import Overloaded, TokenMeshError
from tokenmesh.shared.telemetry.span import span

logger = logging.getLogger(__name__)

_OTHERS_S: Final = 5.0
"""Longest wait for an image that another request's load brings."""
_GRACE_S: Final = 2.0
"""A store that is so late is waited for no longer; its load may go on."""


@dataclass(slots=True)
class StoreReader:
    """Images that do not come are computed. Every slot that it reserves is given back."""

    settings: KvSettings
    shared: SharedKv
    host: EngineHost
    process: TransferProcess
    on_read: Callable[[str, int, float, str], None]
    """Called after each read with its stores, good bytes, seconds and the reason of bad ones."""
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    _change: asyncio.Event = field(default_factory=asyncio.Event)

    async def restore(self, request: Request, stream: WorkerStream) -> None:
        """Return when nothing more comes, or it takes too long. Raises nothing."""
        if not self.process.is_able:
            return
        task = asyncio.create_task(self._restore(request, stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        tokens_s = request.num_known * self.shared.token_bytes / BYTES_PER_S
        limit_s = 2 * self.settings.transfer_s + tokens_s + _GRACE_S
        done, _ = await asyncio.wait({task}, timeout=limit_s)
        if not done:
            logger.warning("a store of KV does not answer: the prompt is computed")
            task.add_done_callback(lambda _: self._let_go(request))

    def note(self) -> None:
        """Images may have come: who waits for them looks again."""
        change, self._change = self._change, asyncio.Event()
        change.set()

    async def settle(self, limit_s: float) -> bool:
        """Return whether no load runs, at the latest after so long."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=limit_s)
        return not self._tasks

    def _let_go(self, request: Request) -> None:
        try:
            self.host.submit(Consult(lambda engine: engine.exchange.let_go(request), Future()))
        except Overloaded:
            logger.warning("images stay pinned: the engine takes no commands")

    async def _restore(self, request: Request, stream: WorkerStream) -> None:
        try:
            until_s = monotonic_s() + _OTHERS_S
            while stream.ended_s is None and monotonic_s() < until_s:
                lacking = await ask(self.host, lambda engine: engine.exchange.lacks(request))
                count = await self.process.find(lacking.keys[:MOST_SLOTS]) if lacking.keys else 0
                if count and not await self._load(request, count):
                    return
                # a load of another request brings what follows
                if count < len(lacking.keys) or not lacking.is_awaited:
                    return
                await self._others_bring(until_s)
        except (TokenMeshError, TimeoutError) as error:
            logger.warning("no KV of a store: %s", error)

    async def _others_bring(self, until_s: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, until_s - monotonic_s())):
                await self._change.wait()
        except TimeoutError:
            return

    async def _load(self, request: Request, count: int) -> bool:
        """Return whether all came that slots were reserved for."""
        wanted = await ask(self.host, lambda engine: engine.exchange.expect(request, count))
        keys, slots = _loaded_by(wanted)
        if not keys:
            return True
        attributes: dict[str, str | int] = {"wanted": len(keys)}
        with span("worker.kv_restore", attributes, parent=request.spec.traceparent) as current:
            are_good = [False] * len(keys)
            try:
                ended = await self.process.get(keys, slots)
                are_good = ended.are_good
            finally:
                await ask(
                    self.host,
                    lambda engine: engine.exchange.arrived(request, keys, are_good, is_stored=True),
                )
                self.note()
            num_bytes = sum(are_good) * self.shared.arena.image_bytes
            self.on_read(ended.transport, num_bytes, ended.seconds, ended.reason)
            current.set_attribute("brought", sum(are_good))
            current.set_attribute("bytes", num_bytes)
            current.set_attribute("store", ended.transport)
        return all(are_good)


def _loaded_by(wanted: Wanted) -> tuple[Sequence[bytes], Sequence[int]]:
    """Keys and slots of a load."""
    pairs = [
        (key, slot) for key, slot in zip(wanted.keys, wanted.slots, strict=True) if slot is not None
    ]
    return [key for key, _ in pairs], [slot for _, slot in pairs]
