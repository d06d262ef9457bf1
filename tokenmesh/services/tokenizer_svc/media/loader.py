"""MediaLoader: turns the images in messages into features in the blob store.

An image is identified by the hash of its file and of the preprocessing, never by a client's name
for it. Features are stored under that hash, so an image of an earlier turn is not preprocessed
again.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from tokenmesh.services.tokenizer_svc.media.decode_child import (
    INVALID,
    PREPARED,
    TOO_LARGE,
    job_of,
)
from tokenmesh.services.tokenizer_svc.media.fetch import (
    DATA_SCHEME,
    Fetcher,
    decode_data_uri,
    read_source,
)
from tokenmesh.services.tokenizer_svc.media.processor import ItemText, PreparedItem
from tokenmesh.services.tokenizer_svc.media.vision import StoredItem, VisionModel
from tokenmesh.services.tokenizer_svc.messages import MediaPart
from tokenmesh.services.tokenizer_svc.threads import Threads
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.child_pool import ChildDied, ChildLate, ChildLimits, ChildPool
from tokenmesh.shared.config.model import MediaSettings
from tokenmesh.shared.errors import (
    InvalidInput,
    NotFound,
    PayloadTooLarge,
    ProtocolError,
    field_name,
)
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.telemetry.span import span

_CHILD: Final = "tokenmesh.services.tokenizer_svc.media.decode_child"


class ImageDecoder:
    """Turns image files into a model's features, in child processes that are killed when late.

    Tenants take turns.
    """

    def __init__(self, limits: MediaSettings, checkpoint: Path) -> None:
        self._pool = ChildPool(
            "images to be decoded",
            _CHILD,
            (
                str(limits.decode_timeout_s),
                str(limits.decode_memory_bytes),
                str(limits.max_pixels),
                str(checkpoint),
            ),
            ChildLimits(
                limits.decode_processes,
                limits.decode_queue,
                limits.decode_timeout_s,
                most_each=limits.decode_processes,
            ),
            b"",
        )

    async def decode(self, data: bytes, options: bytes, tenant: str) -> PreparedItem:
        """options: the JSON of `mm_processor_kwargs`, or nothing.

        Raises InvalidInput, PayloadTooLarge, Overloaded.
        """
        try:
            answer = await self._pool.ask(job_of(data, options), tenant, len(data))
        except ChildLate as error:
            raise PayloadTooLarge(f"the image cannot be decoded: {error.message}") from error
        except ChildDied as error:
            raise PayloadTooLarge("the image exceeds the limits of decoding") from error
        kind, rest = answer[:1], answer[1:]
        if kind == PREPARED:
            return PreparedItem.decode(rest)
        if kind == TOO_LARGE:
            raise PayloadTooLarge(rest.decode())
        if kind == INVALID:
            raise InvalidInput(rest.decode())
        raise ProtocolError(f"unknown answer of a decoding process: {kind!r}")

    async def start(self) -> None:
        """Start the processes before the first image needs one. Raises Unavailable."""
        await self._pool.start()

    async def stop(self) -> None:
        await self._pool.stop()


_FEATURES: Final = "features:"
_PREPARED: Final = "prepared:"
_ALIAS: Final = "media-uuid:"
_BYTES_PER_CHAR: Final = 100
"""Bytes that are hashed, or decoded from base64, in the time of encoding one character."""


class MediaLoader:
    """Fetches, decodes and preprocesses images; shared by all models of a process."""

    def __init__(
        self, limits: MediaSettings, blobs: Blobs, fetcher: Fetcher, threads: Threads
    ) -> None:
        self._limits = limits
        self._blobs = blobs
        self._fetcher = fetcher
        self._threads = threads
        self._decoders: dict[Path, ImageDecoder] = {}
        """By checkpoint."""

    async def prepare(self, vision: VisionModel) -> None:
        """Start the processes that decode a model's images. Raises Unavailable."""
        await self._decoder(vision.checkpoint).start()

    async def stop(self) -> None:
        for decoder in self._decoders.values():
            await decoder.stop()

    async def load(
        self,
        parts: Sequence[MediaPart],
        vision: VisionModel,
        scope: str,
        tenant: str,
        options: bytes = b"",
    ) -> list[StoredItem]:
        """An item for each part, in order; a source that appears twice is read once.

        `scope` separates the uuids of models and salts, options: the JSON of
        `mm_processor_kwargs`. Raises InvalidInput that names the part.
        """
        if len(parts) > vision.max_images:
            raise InvalidInput(
                f"the prompt holds {len(parts)} images, at most {vision.max_images}",
                param="messages",
            )
        with span("media", {"tokenmesh.images": len(parts)}):
            first_by_source = {(part.url, part.uuid): part for part in reversed(parts)}
            tasks = {
                source: asyncio.create_task(self._load_part(part, vision, scope, tenant, options))
                for source, part in first_by_source.items()
            }
            try:
                await asyncio.gather(*tasks.values())
            finally:
                for task in tasks.values():
                    task.cancel()
            return [tasks[part.url, part.uuid].result() for part in parts]

    async def _load_part(
        self, part: MediaPart, vision: VisionModel, scope: str, tenant: str, options: bytes
    ) -> StoredItem:
        try:
            if part.url is None:
                return await self._recall(part.uuid or "", scope)
            with span("fetch"):
                data = await self._read(part.url, tenant)
            item = await self._preprocess(data, vision, tenant, options)
            if part.uuid is not None:
                await self._remember(part.uuid, scope, item)
            return item
        except InvalidInput as error:
            # All of these are errors of the client: name the image.
            raise type(error)(
                f"{field_name(part.path)}: {error.message}", param="messages", path=part.path
            ) from error

    async def _read(self, url: str, tenant: str) -> bytes:
        limit = self._limits.max_bytes
        if url.startswith(DATA_SCHEME):
            work = partial(decode_data_uri, url, limit)
            return await self._threads.run_text(tenant, len(url) // _BYTES_PER_CHAR, work)
        return await read_source(url, self._fetcher, self._blobs, limit, tenant)

    async def _preprocess(
        self, data: bytes, vision: VisionModel, tenant: str, options: bytes
    ) -> StoredItem:
        work = partial(_content_hash, data, vision.processor.options, options)
        content_hash = await self._threads.run_text(tenant, len(data) // _BYTES_PER_CHAR, work)
        with span("preprocess", {"tokenmesh.bytes": len(data)}) as current:
            stored = await self._stored(content_hash)
            if stored is not None and await self._blobs.renew(stored.features, self._limits.ttl_s):
                current.set_attribute("tokenmesh.cached", 1)
                return stored
            item = await self._decoder(vision.checkpoint).decode(data, options, tenant)
        stored = StoredItem(content_hash, BlobKey(_FEATURES + content_hash), item.prepared)
        head = msgspec.json.encode(item.prepared)
        ttl_s = self._limits.ttl_s
        await self._blobs.put(item.features, key=stored.features, ttl_s=ttl_s)
        await self._blobs.put(head, key=BlobKey(_PREPARED + content_hash), ttl_s=ttl_s)
        return stored

    async def _stored(self, content_hash: str) -> StoredItem | None:
        """The item, which was prepared before, for a full time to live; None: it was not."""
        key = BlobKey(_PREPARED + content_hash)
        try:
            head = await self._blobs.get(key)
        except NotFound:
            return None
        await self._blobs.renew(key, self._limits.ttl_s)
        prepared = msgspec.json.decode(head, type=ItemText)
        return StoredItem(content_hash, BlobKey(_FEATURES + content_hash), prepared)

    def _decoder(self, checkpoint: Path) -> ImageDecoder:
        if checkpoint not in self._decoders:
            self._decoders[checkpoint] = ImageDecoder(self._limits, checkpoint)
        return self._decoders[checkpoint]

    async def _remember(self, uuid: str, scope: str, item: StoredItem) -> None:
        key = self._alias(uuid, scope)
        await self._blobs.put(item.content_hash.encode(), key=key, ttl_s=self._limits.ttl_s)

    async def _recall(self, uuid: str, scope: str) -> StoredItem:
        stored: StoredItem | None = None
        with suppress(NotFound):
            content_hash = (await self._blobs.get(self._alias(uuid, scope))).decode()
            stored = await self._stored(content_hash)
        if stored is None:
            raise NotFound(f"no image is stored under the uuid {uuid!r}: send the image")
        # If they have expired, the encoder uses its embeddings, or reports that it needs the image.
        await self._blobs.renew(stored.features, self._limits.ttl_s)
        return stored

    def _alias(self, uuid: str, scope: str) -> BlobKey:
        limit = self._limits.max_uuid_chars
        if len(uuid) > limit:
            raise InvalidInput(f"the uuid is longer than {limit} characters")
        digest = hashlib.sha256(b"\0".join((scope.encode(), uuid.encode()))).hexdigest()
        return BlobKey(_ALIAS + digest)


def _content_hash(data: bytes, *options: bytes) -> str:
    digest = hashlib.sha256()
    for each in options:
        digest.update(len(each).to_bytes(8, "little"))
        digest.update(each)
    digest.update(data)
    return digest.hexdigest()
