"""KvFetcher: a reader's side. A request waits here until images of its prompt are in the host tier.

What does not come is computed: only a source that was given up is an error.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from tokenmesh.engine.kv.exchange import Wanted
from tokenmesh.engine.kv.shared_arena import SharedKv
from tokenmesh.engine.request.request import Request
from tokenmesh.services.worker_svc.kv.asking import ask
from tokenmesh.services.worker_svc.kv.child import TransferProcess
from tokenmesh.services.worker_svc.kv.orders import SUM_BYTES
from tokenmesh.services.worker_svc.streams import WorkerStream
from tokenmesh.services.worker_svc.thread import EngineHost
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import (
    BusLost,
    DeadlineExceeded,
    KvSourceFailed,
    NoResponders,
    ProtocolError,
    TokenMeshError,
)
from tokenmesh.shared.ids import WorkerId
from tokenmesh.shared.messages import (
    Generate,
    KvReady,
    KvStarted,
    Message,
    PollKv,
    PrefillKv,
    Refused,
    ReleaseKv,
)
from tokenmesh.shared.messages.place import KvOrigin
from tokenmesh.shared.telemetry.span import span
from tokenmesh.shared.tokens import unpack_ids

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer", KvStarted, KvReady)

ASSUMED_BYTES_PER_S: Final = 500e6
"""Transfers are taken to go at this rate before the first."""
_RECENT: Final = 0.2
"""Weight of the last transfer in their rate."""
_OTHERS_S: Final = 5.0
"""Longest wait for an image that another request's load brings."""
_LONGEST_S: Final = 300.0
_LEASE_SHARE: Final = 0.99
"""A reader counts a lease from before it was given, and a bit faster than its source."""
SETTLE_S: Final = 3.0


@dataclass(slots=True)
class Brought:
    """It holds what a fetch has done, for spans and metrics."""

    wanted: int = 0
    images: int = 0
    transport: str = ""
    outcome: str = "nothing missing"

    def attributes(self, image_bytes: int) -> dict[str, str | int]:
        return {
            "wanted": self.wanted,
            "brought": self.images,
            "bytes": self.images * image_bytes,
            "transport": self.transport,
            "outcome": self.outcome,
        }


@dataclass(slots=True)
class _Source:
    """One lease of another worker."""

    origin: KvOrigin
    generate: Generate
    started: KvStarted | None = None


@dataclass(slots=True)
class KvFetcher:
    """Every slot that it reserves is given back, full or empty."""

    settings: WorkerSettings
    shared: SharedKv
    host: EngineHost
    process: TransferProcess
    bus: Bus
    worker_id: WorkerId
    on_read: Callable[[str, int, float, str], None]
    """Called after each read with its transport, good bytes, seconds and the reason of bad ones."""
    _bytes_per_s: float = ASSUMED_BYTES_PER_S
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    _change: asyncio.Event = field(default_factory=asyncio.Event)
    _is_settling: bool = False

    @property
    def tokens_per_s(self) -> float:
        """Return how fast KV comes; 0: none can be fetched."""
        return self._bytes_per_s / self.shared.token_bytes if self.process.is_able else 0.0

    async def fetch(self, request: Request, stream: WorkerStream, generate: Generate) -> None:
        """Return when nothing more comes. Raises KvSourceFailed."""
        task = asyncio.create_task(self._fetch(request, stream, generate))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # a load is never left before it is over
        await asyncio.shield(task)

    def note(self) -> None:
        """Images may have come: who waits for them looks again."""
        change, self._change = self._change, asyncio.Event()
        change.set()

    async def settle(self) -> None:
        """Return when no load runs; those that do are ended."""
        self._is_settling = True
        try:
            if self._tasks:
                await asyncio.wait(set(self._tasks), timeout=SETTLE_S)
            if self._tasks:
                self.process.kill()
                await asyncio.wait(set(self._tasks), timeout=SETTLE_S)
        finally:
            self._is_settling = False

    async def _fetch(self, request: Request, stream: WorkerStream, generate: Generate) -> None:
        assert generate.kv is not None
        source, brought = _Source(generate.kv, generate), Brought()
        attributes: dict[str, str | int] = {"source": generate.kv.worker_id}
        with span("worker.kv_fetch", attributes, parent=request.spec.traceparent) as current:
            try:
                await self._fetch_all(request, stream, source, brought)
            except TokenMeshError as error:
                brought.outcome = error.message
                raise
            finally:
                await self._release(source)
                for name, value in brought.attributes(self.shared.arena.image_bytes).items():
                    current.set_attribute(name, value)

    async def _fetch_all(
        self, request: Request, stream: WorkerStream, source: _Source, brought: Brought
    ) -> None:
        until_s = monotonic_s() + _LONGEST_S
        while monotonic_s() < until_s:
            wanted = await ask(self.host, lambda engine: engine.exchange.expect(request))
            is_missing = any(slot is not None for slot in wanted.slots)
            if is_missing and not await self._load(request, stream, wanted, source, brought):
                return
            if not wanted.is_awaited or self._is_over(stream):
                return
            if not await self._others_bring(until_s):
                return

    def _is_over(self, stream: WorkerStream) -> bool:
        return stream.ended_s is not None or self._is_settling

    async def _others_bring(self, until_s: float) -> bool:
        """Return whether a load of another request has ended meanwhile."""
        try:
            async with asyncio.timeout(min(_OTHERS_S, until_s - monotonic_s())):
                await self._change.wait()
        except TimeoutError:
            return False
        return True

    async def _load(
        self,
        request: Request,
        stream: WorkerStream,
        wanted: Wanted,
        source: _Source,
        brought: Brought,
    ) -> bool:
        """Return whether all came that slots were reserved for. Raises KvSourceFailed."""
        pending = [
            (wanted.first + place, key, slot)
            for place, (key, slot) in enumerate(zip(wanted.keys, wanted.slots, strict=True))
            if slot is not None
        ]
        brought.wanted += len(pending)
        try:
            if source.started is None and not await self._start(request, wanted, source):
                brought.outcome = "refused"
                return False
            have = pending[0][0]
            while pending and not self._is_over(stream):
                sent_s = monotonic_s()
                ready = await self._poll(source, have)
                self._note_computed(request, wanted, ready)
                have = ready.first + len(ready.slots) // 4
                batch = [each for each in pending if each[0] < have]
                pending = pending[len(batch) :]
                if batch:
                    await self._read(request, source, ready, batch, sent_s, brought)
                if ready.is_done:
                    break
        finally:
            if pending:
                await self._arrived(request, [key for _, key, _ in pending], [False] * len(pending))
        brought.outcome = "less" if pending else "all"
        return not pending

    def _note_computed(self, request: Request, wanted: Wanted, ready: KvReady) -> None:
        cached = request.num_prompt - ready.computed
        request.prepared.remote_from = max(cached, wanted.num_hits * self.shared.block_size)

    async def _read(
        self,
        request: Request,
        source: _Source,
        ready: KvReady,
        batch: Sequence[tuple[int, bytes, int]],
        sent_s: float,
        brought: Brought,
    ) -> None:
        """Bring a batch; all of its slots are given back. Raises KvSourceFailed."""
        assert source.started is not None
        keys, are_good = [key for _, key, _ in batch], [False] * len(batch)
        try:
            remote, places = (
                unpack_ids(ready.slots),
                [number - ready.first for number, _, _ in batch],
            )
            sums = [ready.checksums[SUM_BYTES * at : SUM_BYTES * (at + 1)] for at in places]
            ended = await self.process.read(
                source.started.addresses,
                source.started.lease,
                source.started.token,
                [remote[at] for at in places],
                [slot for _, _, slot in batch],
                b"".join(sums),
            )
            if monotonic_s() < sent_s + _LEASE_SHARE * source.started.lease_s:
                are_good = ended.are_good
        finally:
            await self._arrived(request, keys, are_good)
        count = sum(are_good)
        num_bytes = count * self.shared.arena.image_bytes
        brought.images += count
        brought.transport = ended.transport
        self.on_read(ended.transport, num_bytes, ended.seconds, ended.reason)
        if count and ended.seconds > 0:
            self._bytes_per_s += _RECENT * (num_bytes / ended.seconds - self._bytes_per_s)
        if count < len(batch):
            reason = ended.reason or "lease"
            logger.warning(
                "kv transfer failed: request %s, source %s, %s, lease %d, %d of %d images: %s",
                request.spec.request_id,
                source.origin.worker_id,
                ended.transport or "no transport",
                source.started.lease,
                count,
                len(batch),
                reason,
            )
            raise self._failed(source, reason)

    async def _arrived(
        self, request: Request, keys: Sequence[bytes], are_good: Sequence[bool]
    ) -> None:
        await ask(self.host, lambda engine: engine.exchange.arrived(request, keys, are_good))
        self.note()

    async def _start(self, request: Request, wanted: Wanted, source: _Source) -> bool:
        """Return whether the source keeps images for this request. Raises KvSourceFailed."""
        origin = source.origin
        theirs = msgspec.structs.replace(
            source.generate, epoch=origin.epoch, reservation=origin.reservation, kv=None
        )
        message = PrefillKv(
            generate=theirs,
            reader=self.worker_id,
            scope=self.shared.scope,
            num_blocks=wanted.num_blocks,
            last_key=wanted.last_key,
            computes=origin.computes,
            hashes=b"" if origin.computes else wanted.hashes,
        )
        limit_s = self.settings.kv.silent_s
        if theirs.media:
            limit_s += self.settings.media_wait_s
        try:
            answer = await self._request(source, message, limit_s)
        except (NoResponders, DeadlineExceeded, BusLost) as error:
            raise self._failed(source, error.message) from error
        except TokenMeshError as error:
            logger.info("no KV from %s: %s", origin.worker_id, error.message)
            return False
        if isinstance(answer, Refused):
            logger.info("no KV from %s: %s", origin.worker_id, answer.reason)
            return False
        source.started = _checked(answer, KvStarted)
        return True

    async def _poll(self, source: _Source, have: int) -> KvReady:
        assert source.started is not None
        message = PollKv(lease=source.started.lease, token=source.started.token, have=have)
        try:
            ready = _checked(
                await self._request(source, message, self.settings.kv.silent_s), KvReady
            )
            count = len(ready.slots) // 4
            if ready.first != have or len(ready.checksums) != SUM_BYTES * count:
                raise ProtocolError("KvReady does not fit what was asked")
        except TokenMeshError as error:
            raise self._failed(source, error.message) from error
        return ready

    async def _release(self, source: _Source) -> None:
        if source.started is None:
            return
        message = ReleaseKv(lease=source.started.lease, token=source.started.token)
        try:
            await self._request(source, message, self.settings.kv.silent_s)
        except TokenMeshError as error:
            # it ends by time
            logger.debug("a lease was not released: %s", error.message)

    async def _request(self, source: _Source, message: Message, limit_s: float) -> Message:
        subject = subjects.worker_kv(source.origin.worker_id)
        return await self.bus.request(subject, message, deadline_s=now_s() + limit_s)

    def _failed(self, source: _Source, reason: str) -> KvSourceFailed:
        worker = source.origin.worker_id
        error = KvSourceFailed(f"KV from {worker} does not come: {reason}")
        error.source = worker
        return error


def _checked(answer: Message, kind: type[_Answer]) -> _Answer:
    if not isinstance(answer, kind):
        raise ProtocolError(f"the answer is {type(answer).__name__}, not {kind.__name__}")
    return answer
