"""Embeddings: where an image's embeddings come from. Memory, Redis, a request that is on it, tower.

Keys hold the tower's fingerprint and the image's full content hash: whoever finds an entry may use
it, in this process or after its restart.
"""

import asyncio
from typing import Protocol

import msgspec

from tokenmesh.services.mm_encoder_svc.batcher import Batcher
from tokenmesh.services.mm_encoder_svc.cache import EmbeddingCache
from tokenmesh.shared import tensor_blob
from tokenmesh.shared.blobs import Blobs, check_of
from tokenmesh.shared.errors import NotFound, ProtocolError
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages.media import EMBEDDINGS_PREFIX, MediaItem
from tokenmesh.shared.telemetry.span import span
from tokenmesh.shared.tensor_blob import TensorBlob


class Tower(Protocol):
    """What is asked of a loaded tower (tower.py), which brings torch along."""

    tokens_per_item: int
    fingerprint: str

    def check(self, pixels: TensorBlob) -> None:
        """Raise ProtocolError for pixels that the tower does not take."""


class Embeddings:
    """One model's embeddings."""

    def __init__(
        self, tower: Tower, batcher: Batcher, cache: EmbeddingCache, blobs: Blobs, ttl_s: int
    ) -> None:
        self._tower = tower
        self._batcher = batcher
        self._cache = cache
        self._blobs = blobs
        self._ttl_s = ttl_s
        self._in_flight: dict[BlobKey, asyncio.Task[tuple[bool, str]]] = {}

    async def obtain(self, item: MediaItem) -> tuple[MediaItem, bool]:
        """The item with its embeddings, and whether they were computed for this call.

        Raises NotFound when the pixels have expired: the prompt must be tokenized again.
        """
        if item.length != self._tower.tokens_per_item:
            raise ProtocolError(
                f"the prompt holds {item.length} placeholders for an image of "
                f"{self._tower.tokens_per_item} embeddings"
            )
        key = BlobKey(f"{EMBEDDINGS_PREFIX}{self._tower.fingerprint}:{item.content_hash}")
        task = self._in_flight.get(key)
        is_first = task is None
        if task is None:
            task = asyncio.create_task(self._provide(key, item))
            self._in_flight[key] = task
            task.add_done_callback(lambda done: self._land(key, done))
        # One caller's cancellation must not take the image from the others.
        was_computed, check = await asyncio.shield(task)
        filled = msgspec.structs.replace(item, embeddings=key, embeddings_check=check)
        return filled, is_first and was_computed

    async def _provide(self, key: BlobKey, item: MediaItem) -> tuple[bool, str]:
        """Make sure that the blob is in Redis, for a full time to live.

        Whether it was computed, and its check; none where another process has computed it.
        """
        blob = self._cache.get(key)
        if await self._blobs.renew(key, self._ttl_s):
            return False, "" if blob is None else check_of(blob)
        is_new = blob is None
        if blob is None:
            blob = await self._compute(item)
            self._cache.add(key, blob)
        await self._blobs.put(blob, key=key, ttl_s=self._ttl_s)
        return is_new, check_of(blob)

    async def _compute(self, item: MediaItem) -> bytes:
        try:
            pixels = tensor_blob.decode(await self._blobs.get(item.pixels))
        except NotFound as error:
            raise NotFound(
                "the pixels of an image have expired: tokenize the prompt again", param="media"
            ) from error
        self._tower.check(pixels)
        with span("tower"):
            return (await self._batcher.submit(pixels)).encode()

    def _land(self, key: BlobKey, done: "asyncio.Task[tuple[bool, str]]") -> None:
        del self._in_flight[key]
        if not done.cancelled():
            # Read it, in case that every caller has left.
            done.exception()
