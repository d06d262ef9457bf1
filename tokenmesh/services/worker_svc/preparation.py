"""RequestPreparation: requests wait here for embeddings, grammars and adapters, not in the
engine."""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Final

from tokenmesh.engine.media_facts import TEXT_ONLY, MediaFacts
from tokenmesh.engine.request.request import Request
from tokenmesh.services.worker_svc.adapters.lease import AdapterLease, AdapterTurn
from tokenmesh.services.worker_svc.adapters.store import AdapterStore
from tokenmesh.services.worker_svc.admission import check_embeddings
from tokenmesh.services.worker_svc.grammar.compiler import GrammarCompiler
from tokenmesh.services.worker_svc.kv.arrivals import KvArrivals
from tokenmesh.services.worker_svc.load import LoadBook
from tokenmesh.services.worker_svc.loaded import Loaded
from tokenmesh.services.worker_svc.part_embeddings import PartEmbeddings
from tokenmesh.services.worker_svc.streams import WorkerStream, WorkerStreams
from tokenmesh.services.worker_svc.thread import Add, EngineHost
from tokenmesh.shared.blobs import Blobs, check_of
from tokenmesh.shared.clock import now_ns
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.embeds_keys import embeds_keys
from tokenmesh.shared.errors import (
    ConfigError,
    InvalidInput,
    KvSourceFailed,
    NotFound,
    TokenMeshError,
    Unavailable,
)
from tokenmesh.shared.hashing import NO_KEYS, EmbedsKeys
from tokenmesh.shared.messages.beat import WorkerLoad
from tokenmesh.shared.messages.failed import to_failed
from tokenmesh.shared.messages.generate import Generate
from tokenmesh.shared.messages.media import EMBEDDINGS_PREFIX, EMBEDS, MediaItem
from tokenmesh.shared.messages.structured import Structured
from tokenmesh.shared.telemetry.span import span
from tokenmesh.shared.tensor_blob import TensorBlob, decode

logger = logging.getLogger(__name__)

SPEECH_CACHE_BYTES: Final = 64 * 1024 * 1024
"""Embeddings of speech that goes on."""


@dataclass(slots=True)
class RequestPreparation:
    """Hands requests to the engine once they have all they need."""

    settings: WorkerSettings
    loaded: Loaded
    host: EngineHost
    streams: WorkerStreams
    book: LoadBook
    blobs: Blobs
    grammars: GrammarCompiler | None
    """None: no structured output."""
    adapters: AdapterStore | None = None
    arrivals: KvArrivals | None = None
    """None: no KV of other workers or stores."""
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    _parts: PartEmbeddings = field(init=False)

    def __post_init__(self) -> None:
        self._parts = PartEmbeddings(SPEECH_CACHE_BYTES)

    def load(self, sleep_level: int, *, is_indexed: bool) -> WorkerLoad:
        """Return how busy the worker is and whether a grammar would wait for its libraries to
        load."""
        return self.book.load(
            sleep_level,
            streams=self.streams,
            is_indexed=is_indexed,
            is_compiler_starting=self.grammars is not None and self.grammars.is_starting,
        )

    async def begin(self, request: Request, generate: Generate | None = None) -> None:
        """Open the stream. A grammar that is not compiled yet, an adapter that is not in memory or
        has to wait for others, and KV that `generate` says where to get, are awaited in the
        background.

        Raises what keeps a request from its embeddings; InvalidInput where there are no grammars.
        """
        structured = request.spec.sampling.structured
        if structured is not None:
            request.prepared.grammar = self._grammars_for(structured).find(structured)
        stream = self.streams.open(request.key, first_offset=request.output.num_resumed)
        stream.reservation = request.spec.reservation
        stream.owner = request.spec.owner
        try:
            if request.spec.media:
                embeddings = await fetch_embeddings(
                    request.spec.media,
                    self.blobs,
                    self.loaded.hidden_size,
                    self.settings.media_wait_s,
                    self.loaded.media,
                    self.loaded.encoder_states,
                    self._parts,
                )
                keys = await keys_of(request.spec.media, embeddings, self.settings.block_size)
                request.prepared.embeddings, request.prepared.embeds_keys = embeddings, keys
        except BaseException:
            if stream.ended_s is None:
                self.streams.forget(stream)
            raise
        lora = request.spec.lora
        if lora is not None and (lease := self._adapter_store.lease_now(lora)) is not None:
            _set_adapter(request, stream, lease)
        has_grammar = structured is None or request.prepared.grammar is not None
        has_all = has_grammar and (lora is None or stream.adapter is not None)
        if has_all and (self.arrivals is None or not self.arrivals.may_come(generate)):
            self._submit(request, stream)
        else:
            task = asyncio.create_task(self._follow(request, stream, generate))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Submit no more requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.grammars is not None:
            await self.grammars.stop()

    @property
    def _adapter_store(self) -> AdapterStore:
        assert self.adapters is not None, "a request with an adapter was admitted without any"
        return self.adapters

    def _grammars_for(self, structured: Structured) -> GrammarCompiler:
        if self.grammars is None:
            raise InvalidInput(
                f"{structured.field}: this engine has no structured output", param=structured.field
            )
        return self.grammars

    async def _follow(
        self, request: Request, stream: WorkerStream, generate: Generate | None
    ) -> None:
        """Submit once grammar, adapter and KV are there, or with the reason why one is not."""
        self.book.num_preparing += 1
        try:
            await asyncio.gather(self._compile(request), self._fetch(request, stream, generate))
            if request.spec.lora is not None and stream.adapter is None:
                stream.turn = AdapterTurn()
                lease = await self._adapter_store.lease(request.spec.lora, stream.turn)
                stream.turn = None
                _set_adapter(request, stream, lease)
        except TokenMeshError as error:
            request.prepared.refusal = to_failed(error)
        # any error of a library must end the stream
        except Exception as error:
            logger.exception("a grammar or an adapter cannot be loaded")
            reason = f"the grammar or the adapter cannot be loaded: {type(error).__name__}"
            request.prepared.refusal = to_failed(TokenMeshError(reason))
        finally:
            self.book.num_preparing -= 1
        self._submit(request, stream)

    async def _fetch(
        self, request: Request, stream: WorkerStream, generate: Generate | None
    ) -> None:
        """Raises KvSourceFailed unless what does not come is to be computed."""
        if self.arrivals is None:
            return
        try:
            await self.arrivals.bring(request, stream, generate)
        except KvSourceFailed as error:
            logger.warning("%s", error.message)
            if self.settings.kv.load_failure_policy == "fail":
                raise

    async def _compile(self, request: Request) -> None:
        structured = request.spec.sampling.structured
        if structured is None or request.prepared.grammar is not None:
            return
        try:
            grammars = self._grammars_for(structured)
            tenant = request.spec.owner.tenant
            request.prepared.grammar = await grammars.compile(structured, tenant)
        finally:
            request.timeline.grammar_ns = now_ns()

    def _submit(self, request: Request, stream: WorkerStream) -> None:
        """Hand the request to the engine unless it was cancelled meanwhile."""
        if stream.ended_s is not None:
            if self.arrivals is not None:
                self.arrivals.let_go(request)
            return
        try:
            self.host.submit(Add(request))
        except TokenMeshError:
            self.streams.forget(stream)
            raise
        self.book.submitted(request.num_known)
        stream.is_submitted = True


def _set_adapter(request: Request, stream: WorkerStream, lease: AdapterLease) -> None:
    """The stream holds the lease until it ends; one that was cancelled meanwhile does not."""
    if stream.ended_s is not None:
        lease.release()
        return
    stream.adapter = lease
    request.prepared.adapter = lease.adapter.matrices


async def keys_of(
    media: list[MediaItem], embeddings: dict[str, TensorBlob], block_size: int
) -> EmbedsKeys:
    """Computed in a thread: a long prompt has megabytes."""
    if all(item.kind != EMBEDS for item in media):
        return NO_KEYS
    return await asyncio.to_thread(embeds_keys, media, embeddings, block_size)


async def fetch_embeddings(
    media: list[MediaItem],
    blobs: Blobs,
    hidden_size: int,
    timeout_s: float,
    facts: MediaFacts = TEXT_ONLY,
    encoder_states: int = 0,
    parts: PartEmbeddings | None = None,
) -> dict[str, TensorBlob]:
    """The encoder's outputs by content hash; equal items are fetched once, and `parts` of speech
    for several requests.

    Raises Unavailable, which is retryable, when one has expired, takes too long, or is not what
    the encoder has put there, which is removed; InvalidInput when a client's own is of the wrong
    shape.
    """
    attributes: dict[str, str | int] = {
        "tokenmesh.items": len(media),
        "tokenmesh.tokens": sum(item.num_embeddings for item in media),
    }
    with span("merge", attributes) as current:
        known = {} if parts is None else _known(media, parts)
        others = [item for item in media if item.content_hash not in known]
        found = await _fetch_all(others, blobs, hidden_size, timeout_s, facts, encoder_states)
        if parts is not None:
            _keep(others, found, parts)
        found |= known
        current.set_attribute("tokenmesh.bytes", sum(len(blob.data) for blob in found.values()))
    return found


def _known(media: list[MediaItem], parts: PartEmbeddings) -> dict[str, TensorBlob]:
    found = {}
    for item in media:
        if item.follows is not None and item.embeddings is not None:
            blob = parts.get(item.embeddings)
            if blob is not None:
                found[item.content_hash] = blob
    return found


def _keep(media: list[MediaItem], found: dict[str, TensorBlob], parts: PartEmbeddings) -> None:
    for item in media:
        if item.follows is not None and item.embeddings is not None:
            parts.add(item.embeddings, found[item.content_hash])


async def _fetch_all(
    media: list[MediaItem],
    blobs: Blobs,
    hidden_size: int,
    timeout_s: float,
    facts: MediaFacts,
    encoder_states: int,
) -> dict[str, TensorBlob]:
    item_by_hash = {item.content_hash: item for item in media}
    try:
        async with asyncio.timeout(timeout_s):
            items = item_by_hash.values()
            found = await asyncio.gather(
                *(
                    _fetch(item, blobs, facts.width_of(item, hidden_size), encoder_states)
                    for item in items
                )
            )
    except TimeoutError as error:
        raise Unavailable(f"media embeddings did not arrive in {timeout_s:g} s") from error
    except NotFound as error:
        raise Unavailable(f"media embeddings have expired: {error.message}") from error
    embeddings = dict(zip(item_by_hash, found, strict=True))
    for item in media:
        width = facts.width_of(item, hidden_size)
        check_embeddings(item, embeddings[item.content_hash], width, encoder_states)
    return embeddings


async def _fetch(item: MediaItem, blobs: Blobs, width: int, encoder_states: int) -> TensorBlob:
    if item.embeddings is None:
        raise InvalidInput("a media item has not been encoded", param="media")
    try:
        data = await blobs.get(item.embeddings)
        blob = decode(data)
        if item.kind == EMBEDS:
            return blob
        check_embeddings(item, blob, width, encoder_states)
    except (NotFound, Unavailable, ConfigError):
        raise
    except TokenMeshError as error:
        if item.kind == EMBEDS:
            raise
        reason = error.message
    else:
        if item.embeddings_check in ("", check_of(data)):
            return blob
        reason = "they are not what the encoder has stored"
    logger.warning("the embeddings %s are corrupted: %s", item.embeddings, reason)
    if item.embeddings.startswith(EMBEDDINGS_PREFIX):
        await blobs.remove(item.embeddings)
    raise Unavailable(f"media embeddings are corrupted: {reason}")
