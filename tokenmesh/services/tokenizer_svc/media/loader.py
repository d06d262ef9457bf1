"""MediaLoader: turns the images in messages into pixels in the blob store.

An image is identified by the hash of its file and of the preprocessing, never by a client's name
for it. Pixels are stored under that hash, so an image of an earlier turn is not preprocessed again.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from tokenmesh.services.tokenizer_svc.media.decode_child import INVALID, PIXELS, TOO_LARGE
from tokenmesh.services.tokenizer_svc.media.fetch import (
    DATA_SCHEME,
    Fetcher,
    decode_data_uri,
    read_source,
)
from tokenmesh.services.tokenizer_svc.media.vision import Pixels, VisionModel
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
    """Turns image files into the pixels of one model, in child processes that are killed when late.

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

    async def decode(self, data: bytes, tenant: str) -> bytes:
        """The pixels as an encoded TensorBlob. Raises InvalidInput, PayloadTooLarge, Overloaded."""
        try:
            answer = await self._pool.ask(data, tenant, len(data))
        except ChildLate as error:
            raise PayloadTooLarge(f"the image cannot be decoded: {error.message}") from error
        except ChildDied as error:
            raise PayloadTooLarge("the image exceeds the limits of decoding") from error
        kind, rest = answer[:1], answer[1:]
        if kind == PIXELS:
            return rest
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


_PIXELS: Final = "pixels:"
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
        self, parts: Sequence[MediaPart], vision: VisionModel, scope: str, tenant: str
    ) -> list[Pixels]:
        """Pixels for each part, in order; a source that appears twice is read once.

        `scope` separates the uuids of models and salts. Raises InvalidInput that names the part.
        """
        if len(parts) > self._limits.max_images:
            raise InvalidInput(
                f"the prompt holds {len(parts)} images, at most {self._limits.max_images}",
                param="messages",
            )
        with span("media", {"tokenmesh.images": len(parts)}):
            first_by_source = {(part.url, part.uuid): part for part in reversed(parts)}
            tasks = {
                source: asyncio.create_task(self._load_part(part, vision, scope, tenant))
                for source, part in first_by_source.items()
            }
            try:
                await asyncio.gather(*tasks.values())
            finally:
                for task in tasks.values():
                    task.cancel()
            return [tasks[part.url, part.uuid].result() for part in parts]

    async def _load_part(
        self, part: MediaPart, vision: VisionModel, scope: str, tenant: str
    ) -> Pixels:
        try:
            if part.url is None:
                return await self._recall(part.uuid or "", scope)
            with span("fetch"):
                data = await self._read(part.url, tenant)
            pixels = await self._preprocess(data, vision, tenant)
            if part.uuid is not None:
                await self._remember(part.uuid, scope, pixels)
            return pixels
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

    async def _preprocess(self, data: bytes, vision: VisionModel, tenant: str) -> Pixels:
        work = partial(_content_hash, data, vision.processor.options)
        content_hash = await self._threads.run_text(tenant, len(data) // _BYTES_PER_CHAR, work)
        pixels = Pixels(content_hash, BlobKey(_PIXELS + content_hash))
        if await self._blobs.renew(pixels.key, self._limits.ttl_s):
            return pixels
        with span("preprocess", {"tokenmesh.bytes": len(data)}):
            blob = await self._decoder(vision.checkpoint).decode(data, tenant)
        await self._blobs.put(blob, key=pixels.key, ttl_s=self._limits.ttl_s)
        return pixels

    def _decoder(self, checkpoint: Path) -> ImageDecoder:
        if checkpoint not in self._decoders:
            self._decoders[checkpoint] = ImageDecoder(self._limits, checkpoint)
        return self._decoders[checkpoint]

    async def _remember(self, uuid: str, scope: str, pixels: Pixels) -> None:
        key = self._alias(uuid, scope)
        await self._blobs.put(pixels.content_hash.encode(), key=key, ttl_s=self._limits.ttl_s)

    async def _recall(self, uuid: str, scope: str) -> Pixels:
        try:
            content_hash = (await self._blobs.get(self._alias(uuid, scope))).decode()
        except NotFound as error:
            raise NotFound(f"no image is stored under the uuid {uuid!r}: send the image") from error
        pixels = Pixels(content_hash, BlobKey(_PIXELS + content_hash))
        # If they have expired, the encoder uses its embeddings, or reports that it needs the image.
        await self._blobs.renew(pixels.key, self._limits.ttl_s)
        return pixels

    def _alias(self, uuid: str, scope: str) -> BlobKey:
        limit = self._limits.max_uuid_chars
        if len(uuid) > limit:
            raise InvalidInput(f"the uuid is longer than {limit} characters")
        digest = hashlib.sha256(b"\0".join((scope.encode(), uuid.encode()))).hexdigest()
        return BlobKey(_ALIAS + digest)


def _content_hash(data: bytes, options: bytes) -> str:
    digest = hashlib.sha256(len(options).to_bytes(8, "little"))
    digest.update(options)
    digest.update(data)
    return digest.hexdigest()
