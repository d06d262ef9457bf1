"""MediaLoader: turns the media in messages into features in the blob store.

An item is identified by the hash of its file and of the preprocessing, never by a client's name
for it. Features are stored under that hash, so an item of an earlier turn is not preprocessed
again.
"""

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from tokenmesh.services.tokenizer_svc.media.fetch import (
    DATA_SCHEME,
    Fetcher,
    decode_data_uri,
    read_source,
)
from tokenmesh.services.tokenizer_svc.media.item_decoder import ItemDecoder
from tokenmesh.services.tokenizer_svc.media.jobs import NOUN
from tokenmesh.services.tokenizer_svc.media.media_model import NOUNS, MediaModel, StoredItem
from tokenmesh.services.tokenizer_svc.media.processor import ItemText
from tokenmesh.services.tokenizer_svc.messages import MediaPart
from tokenmesh.services.tokenizer_svc.threads import Threads
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.model import MediaSettings
from tokenmesh.shared.errors import (
    InvalidInput,
    NotFound,
    PayloadTooLarge,
    field_name,
)
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.in_flight import InFlight
from tokenmesh.shared.messages.media import AUDIO, VIDEO
from tokenmesh.shared.telemetry.span import span

MAX_UUID_CHARS: Final = 256
"""Length of a client's media uuid."""
URL_KEPT_S: Final = 10.0
"""For how long a URL of a tenant is not fetched again."""

_FEATURES: Final = "features:"
_PREPARED: Final = "prepared:"
_ALIAS: Final = "media-uuid:"
_MAX_RECENT: Final = 1024
_AT_A_TIME: Final = 16
"""Items of one prompt that are read and decoded."""
_BYTES_SETTING: Final = {AUDIO: "max_audio_bytes", VIDEO: "max_video_bytes"}
_BYTES_PER_CHAR: Final = 100
"""Bytes that are hashed, or decoded from base64, in the time of encoding one character."""


_Source = tuple[str, str, str, Path, bytes]
"""Tenant, kind, URL, checkpoint and options."""


class MediaLoader:
    """Fetches, decodes and preprocesses media; shared by all models of a process."""

    def __init__(
        self, limits: MediaSettings, blobs: Blobs, fetcher: Fetcher, threads: Threads
    ) -> None:
        self._limits = limits
        self._blobs = blobs
        self._fetcher = fetcher
        self._threads = threads
        self._decoders: dict[tuple[str, Path], ItemDecoder] = {}
        """By kind and checkpoint."""
        self._fetching: InFlight[tuple[str, str, str], bytes] = InFlight()
        self._recent: OrderedDict[_Source, tuple[float, StoredItem]] = OrderedDict()
        """The items found at URLs, and until when they count (monotonic seconds)."""
        self._preparing: InFlight[tuple[Path, str], StoredItem] = InFlight()
        """By checkpoint and content hash."""

    async def prepare(self, model: MediaModel) -> None:
        """Start the processes that decode a model's media. Raises Unavailable.

        Those of videos, which are few, start with the first one.
        """
        for kind in model.kinds:
            if kind != VIDEO:
                await self._decoder(kind, model.checkpoint).start()

    async def stop(self) -> None:
        for decoder in self._decoders.values():
            await decoder.stop()

    async def load(
        self,
        parts: Sequence[MediaPart],
        model: MediaModel,
        scope: str,
        tenant: str,
        options: bytes = b"",
    ) -> list[StoredItem]:
        """An item for each part, in order; a source that appears twice is read once.

        `scope` separates the uuids of models and salts, options: the JSON of
        `mm_processor_kwargs`. Raises InvalidInput that names the part.
        """
        counts = Counter(part.kind for part in parts)
        for name, kind in model.kinds.items():
            if counts[name] > kind.max_items:
                raise InvalidInput(
                    f"the prompt holds {counts[name]} {NOUNS[name]}, at most {kind.max_items} "
                    f"({kind.setting})",
                    param="messages",
                )
        with span("media", {f"tokenmesh.{NOUNS[name]}": count for name, count in counts.items()}):
            first_by_source = {(part.kind, part.url, part.uuid): part for part in reversed(parts)}
            # The files of a prompt are held in memory until they are decoded.
            places = asyncio.Semaphore(_AT_A_TIME)

            async def load_part(part: MediaPart) -> StoredItem:
                async with places:
                    return await self._load_part(part, model, scope, tenant, options)

            tasks = {
                source: asyncio.create_task(load_part(part))
                for source, part in first_by_source.items()
            }
            try:
                await asyncio.gather(*tasks.values())
            finally:
                for task in tasks.values():
                    task.cancel()
            return [tasks[part.kind, part.url, part.uuid].result() for part in parts]

    async def _load_part(
        self, part: MediaPart, model: MediaModel, scope: str, tenant: str, options: bytes
    ) -> StoredItem:
        try:
            if part.url is None:
                return await self._recall(part, scope)
            source = (tenant, part.kind, part.url, model.checkpoint, options)
            item = await self._found(source)
            if item is None:
                data = await self._fetched(part.url, part.kind, tenant)
                item = await self._preprocess(data, part.kind, model, tenant, options)
                self._keep(source, item)
            if part.uuid is not None:
                await self._remember(part, scope, item)
            return item
        except InvalidInput as error:
            # All of these are errors of the client: name the part.
            raise type(error)(
                f"{field_name(part.path)}: {error.message}", param="messages", path=part.path
            ) from error

    async def _found(self, source: _Source) -> StoredItem | None:
        """Return the item that a URL has recently led to, if its features are still there."""
        until_s, item = self._recent.get(source, (0.0, None))
        if item is None or until_s < monotonic_s():
            return None
        is_there = await self._blobs.renew(item.features, self._limits.ttl_s)
        return item if is_there else None

    def _keep(self, source: _Source, item: StoredItem) -> None:
        if source[2].startswith(("http:", "https:")) and URL_KEPT_S:
            self._recent[source] = (monotonic_s() + URL_KEPT_S, item)
            self._recent.move_to_end(source)
            if len(self._recent) > _MAX_RECENT:
                self._recent.popitem(last=False)

    async def _fetched(self, url: str, kind: str, tenant: str) -> bytes:
        with span("fetch") as current:
            work = partial(self._read, url, kind, tenant)
            try:
                data, is_own = await self._fetching.run((tenant, kind, url), work)
            except PayloadTooLarge as error:
                setting = _BYTES_SETTING.get(kind, "max_bytes")
                text = f"{error.message} (tokenizer.media.{setting})"
                raise PayloadTooLarge(text) from error
            if not is_own:
                current.set_attribute("tokenmesh.shared", 1)
            return data

    async def _read(self, url: str, kind: str, tenant: str) -> bytes:
        limits = self._limits
        by_kind = {AUDIO: limits.max_audio_bytes, VIDEO: limits.max_video_bytes}
        limit = by_kind.get(kind, limits.max_bytes)
        if url.startswith(DATA_SCHEME):
            work = partial(decode_data_uri, url, limit)
            return await self._threads.run_text(tenant, len(url) // _BYTES_PER_CHAR, work)
        return await read_source(url, self._fetcher, self._blobs, limit, tenant)

    async def _preprocess(
        self, data: bytes, kind: str, model: MediaModel, tenant: str, options: bytes
    ) -> StoredItem:
        if kind == AUDIO:
            options = b""  # what a request may set is about images
        work = partial(_content_hash, data, kind.encode(), model.kinds[kind].options, options)
        content_hash = await self._threads.run_text(tenant, len(data) // _BYTES_PER_CHAR, work)
        with span("preprocess", {"tokenmesh.bytes": len(data)}) as current:
            stored = await self._stored(content_hash, kind)
            if stored is not None and await self._blobs.renew(stored.features, self._limits.ttl_s):
                current.set_attribute("tokenmesh.cached", 1)
                return stored
            decoder = self._decoder(kind, model.checkpoint)
            stored, is_own = await self._preparing.run(
                (model.checkpoint, content_hash),
                partial(self._decode, decoder, data, options, tenant, content_hash, kind),
            )
            if not is_own:
                current.set_attribute("tokenmesh.shared", 1)
            return stored

    async def _decode(
        self,
        decoder: ItemDecoder,
        data: bytes,
        options: bytes,
        tenant: str,
        content_hash: str,
        kind: str,
    ) -> StoredItem:
        """The item of a file, after its features are stored."""
        item = await decoder.decode(data, options, tenant)
        stored = StoredItem(content_hash, BlobKey(_FEATURES + content_hash), item.prepared, kind)
        head = msgspec.json.encode(item.prepared)
        ttl_s = self._limits.ttl_s
        await self._blobs.put(item.features, key=stored.features, ttl_s=ttl_s)
        await self._blobs.put(head, key=BlobKey(_PREPARED + content_hash), ttl_s=ttl_s)
        return stored

    async def _stored(self, content_hash: str, kind: str) -> StoredItem | None:
        """The item, which was prepared before, for a full time to live; None: it was not."""
        key = BlobKey(_PREPARED + content_hash)
        try:
            head = await self._blobs.get(key)
        except NotFound:
            return None
        await self._blobs.renew(key, self._limits.ttl_s)
        prepared = msgspec.json.decode(head, type=ItemText)
        return StoredItem(content_hash, BlobKey(_FEATURES + content_hash), prepared, kind)

    def _decoder(self, kind: str, checkpoint: Path) -> ItemDecoder:
        if (kind, checkpoint) not in self._decoders:
            self._decoders[kind, checkpoint] = ItemDecoder(kind, self._limits, checkpoint)
        return self._decoders[kind, checkpoint]

    async def _remember(self, part: MediaPart, scope: str, item: StoredItem) -> None:
        key = self._alias(part, scope)
        await self._blobs.put(item.content_hash.encode(), key=key, ttl_s=self._limits.ttl_s)

    async def _recall(self, part: MediaPart, scope: str) -> StoredItem:
        stored: StoredItem | None = None
        with suppress(NotFound):
            content_hash = (await self._blobs.get(self._alias(part, scope))).decode()
            stored = await self._stored(content_hash, part.kind)
        if stored is None:
            noun = NOUN[part.kind].removeprefix("the ")
            raise NotFound(f"no {noun} is stored under the uuid {part.uuid!r}: send the {noun}")
        # If they have expired, the encoder uses its embeddings, or reports that it needs the item.
        await self._blobs.renew(stored.features, self._limits.ttl_s)
        return stored

    def _alias(self, part: MediaPart, scope: str) -> BlobKey:
        uuid, limit = part.uuid or "", MAX_UUID_CHARS
        if len(uuid) > limit:
            raise InvalidInput(f"the uuid is longer than {limit} characters")
        digest = hashlib.sha256(
            b"\0".join((scope.encode(), part.kind.encode(), uuid.encode()))
        ).hexdigest()
        return BlobKey(_ALIAS + digest)


def _content_hash(data: bytes, *options: bytes) -> str:
    digest = hashlib.sha256()
    for each in options:
        digest.update(len(each).to_bytes(8, "little"))
        digest.update(each)
    digest.update(data)
    return digest.hexdigest()
