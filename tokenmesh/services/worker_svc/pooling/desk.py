"""PoolDesk: a Pool on its way through the engine, until all of its items are answered.

A Pool is a stream without tokens: it is cancelled, drained and given up with the same calls. Its
items are requests of the engine of their own, which share a step with those of other Pools.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tokenmesh.engine.core.engine import ABORTED
from tokenmesh.engine.core.outputs import EndedStream
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import Ending, StreamKey
from tokenmesh.services.worker_svc.adapters.lease import AdapterTurn
from tokenmesh.services.worker_svc.adapters.store import AdapterStore, adapter_of
from tokenmesh.services.worker_svc.admission import tenant_of
from tokenmesh.services.worker_svc.load import LoadBook
from tokenmesh.services.worker_svc.loaded import Loaded
from tokenmesh.services.worker_svc.pooling.admission import admit_pool, num_cached, num_tokens_of
from tokenmesh.services.worker_svc.preparation import fetch_embeddings, keys_of
from tokenmesh.services.worker_svc.streams import WorkerStream, WorkerStreams
from tokenmesh.services.worker_svc.thread import AddAll, End, EngineHost
from tokenmesh.shared.blobs import Blobs, check_of
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import Cancelled, Overloaded, TokenMeshError
from tokenmesh.shared.hashing import Adapter
from tokenmesh.shared.ids import new_blob_key
from tokenmesh.shared.messages import Failed, PoolAnswer, Refused
from tokenmesh.shared.messages.failed import from_failed
from tokenmesh.shared.messages.pooling import Pool, Pooled

_INLINE_BYTES: Final = 64 << 10
"""Largest answer of an item that is part of the message."""
_MESSAGE_BYTES: Final = 1 << 20
"""It bounds the bytes of all answers in one message; further ones are blobs too."""


@dataclass(slots=True, eq=False)
class _Work:
    """A Pool in the engine."""

    stream: WorkerStream
    requests: list[Request]
    num_left: int
    done: "asyncio.Future[Ending]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """The first ending that is not a success, else that of the last item."""


class PoolDesk:
    """It answers the Pools of one worker. Used on the event loop."""

    def __init__(
        self,
        settings: WorkerSettings,
        loaded: Loaded,
        host: EngineHost,
        streams: WorkerStreams,
        book: LoadBook,
        blobs: Blobs,
        adapters: AdapterStore | None = None,
    ) -> None:
        """adapters: None: there are none."""
        self._settings = settings
        self._loaded = loaded
        self._host = host
        self._streams = streams
        self._book = book
        self._blobs = blobs
        self._adapters = adapters
        self._work: dict[StreamKey, _Work] = {}

    async def answer(self, message: Pool, traceparent: str | None) -> PoolAnswer | Refused:
        """Compute all items. Raises what keeps one of them from its numbers.

        Its items are dropped when the caller gives up, when the Pool is cancelled, and when one of
        them fails.
        """
        lora = adapter_of(self._adapters, message)
        owner, num_tokens = tenant_of(message), num_tokens_of(message)
        if (refusal := self._book.refusal(num_tokens, owner, self._streams)) is not None:
            return refusal
        key = StreamKey(message.gateway, message.stream, message.attempt)
        stream = self._streams.open(key, first_offset=0)
        stream.reservation, stream.owner = message.reservation, owner
        stream.num_items = len(message.items)
        try:
            requests = await admit_pool(
                message, self._loaded, self._settings.block_size, traceparent, lora
            )
            await self._fetch_media(requests)
            if lora is not None:
                await self._take_adapter(stream, requests, lora)
            ending = await self._compute(stream, requests)
            if ending.reason != "stop":
                raise _error_of(ending)
            return PoolAnswer(
                pooled=await self._packed(requests), cached_tokens=num_cached(requests)
            )
        finally:
            self._give_up(stream)

    def note(self, ended: EndedStream) -> None:
        """An item has ended in the engine."""
        key = ended.request.key
        work = self._work.get(key._replace(item=0))
        if work is None:
            return
        work.num_left -= 1
        is_over = not work.num_left or ended.ending.reason != "stop"
        if is_over and not work.done.done():
            work.done.set_result(ended.ending)

    def cancel(self, stream: WorkerStream, ending: Ending = ABORTED) -> bool:
        """End a Pool whose handler has yet to answer; False: the stream is none."""
        work = self._work.get(stream.key)
        if work is not None and not work.done.done():
            work.done.set_result(ending)
        return work is not None

    async def _fetch_media(self, requests: Sequence[Request]) -> None:
        """Give each request the embeddings of its media; those of equal items are fetched once.

        Raises Unavailable where they have expired, InvalidInput where they do not fit.
        """
        media = [item for request in requests for item in request.spec.media]
        if not media:
            return
        loaded, timeout_s = self._loaded, self._settings.media_wait_s
        found = await fetch_embeddings(
            media, self._blobs, loaded.hidden_size, timeout_s, loaded.media
        )
        for request in requests:
            own = {each.content_hash: found[each.content_hash] for each in request.spec.media}
            if own:
                keys = await keys_of(request.spec.media, own, self._settings.block_size)
                request.prepared.embeddings, request.prepared.embeds_keys = own, keys

    async def _take_adapter(
        self, stream: WorkerStream, requests: Sequence[Request], lora: Adapter
    ) -> None:
        """Give each request the matrices of its adapter; the stream's end gives them back.

        Raises Overloaded where streams of too many others run, Unavailable for another content.
        """
        assert self._adapters is not None, "a Pool with an adapter was admitted without any"
        if stream.ended_s is not None:
            return  # cancelled while its items were read
        stream.turn = AdapterTurn()
        stream.adapter = await self._adapters.lease(lora, stream.turn)
        stream.turn = None
        matrices = stream.adapter.adapter.matrices
        for request in requests:
            request.prepared.adapter = matrices

    async def _compute(self, stream: WorkerStream, requests: list[Request]) -> Ending:
        if stream.ended_s is not None:
            return ABORTED  # cancelled while its items were read
        work = self._work[stream.key] = _Work(stream, requests, len(requests))
        self._host.submit(AddAll(requests))
        stream.is_submitted = True
        for request in requests:
            self._book.submitted(request.num_known)
        return await work.done

    def _give_up(self, stream: WorkerStream) -> None:
        """Drop what is left in the engine."""
        work = self._work.pop(stream.key, None)
        if work is not None and work.num_left:
            with suppress(Overloaded):  # then they are computed, and not used
                self._host.submit(End(ABORTED, stream.key, stream.num_items))
        self._streams.end(stream, monotonic_s())

    async def _packed(self, requests: Sequence[Request]) -> list[Pooled]:
        """The answers, with large ones as blobs."""
        answers: list[Pooled] = []
        num_bytes = 0
        for request in requests:
            pooled = request.output.pooled
            assert pooled is not None, "the engine has answered"
            num_bytes += len(pooled.data)
            if len(pooled.data) > _INLINE_BYTES or num_bytes > _MESSAGE_BYTES:
                num_bytes -= len(pooled.data)
                # a new key: hashing what is large would hold the event loop
                key = await self._blobs.put(pooled.data, new_blob_key("pooled"))
                check = check_of(pooled.data)
                pooled = msgspec.structs.replace(pooled, data=b"", blob=key, blob_check=check)
            answers.append(pooled)
        return answers


def _error_of(ending: Ending) -> TokenMeshError:
    error: Failed | None = ending.error
    return from_failed(error) if error is not None else Cancelled("the Pool was cancelled")
