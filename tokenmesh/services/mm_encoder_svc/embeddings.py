"""Embeddings: finds an item's embeddings in memory or Redis, or computes them.

Keys hold the tower's fingerprint and the item's full content hash, so any process with the same
tower may use an entry, also after a restart.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from tokenmesh.services.mm_encoder_svc.batcher import Batcher, Features, StateLost
from tokenmesh.shared import tensor_blob
from tokenmesh.shared.blobs import Blobs, check_of
from tokenmesh.shared.errors import NotFound, ProtocolError
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.in_flight import InFlight
from tokenmesh.shared.messages.media import EMBEDDINGS_PREFIX, MediaItem
from tokenmesh.shared.telemetry.span import span

if TYPE_CHECKING:
    from tokenmesh.services.mm_encoder_svc.tower import Tower  # imports torch


def _an(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


class EmbeddingCache:
    """A cache bounded by bytes, which evicts the least recently used entry.

    An entry larger than the bound is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._blobs: OrderedDict[str, bytes] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._blobs)

    def get(self, key: str) -> bytes | None:
        """The blob, which becomes the most recently used."""
        blob = self._blobs.get(key)
        if blob is not None:
            self._blobs.move_to_end(key)
        return blob

    def add(self, key: str, blob: bytes) -> None:
        """Add a blob, and evict others until all fit."""
        old = self._blobs.pop(key, b"")
        self.num_bytes -= len(old)
        if len(blob) > self._max_bytes:
            return
        self._blobs[key] = blob
        self.num_bytes += len(blob)
        while self.num_bytes > self._max_bytes:
            _, evicted = self._blobs.popitem(last=False)
            self.num_bytes -= len(evicted)


class Embeddings:
    """The embeddings of one model's media."""

    def __init__(
        self, tower: "Tower", batcher: Batcher, cache: EmbeddingCache, blobs: Blobs, ttl_s: int
    ) -> None:
        self._tower = tower
        self._batcher = batcher
        self._cache = cache
        self._blobs = blobs
        self._ttl_s = ttl_s
        self._in_flight: InFlight[BlobKey, tuple[bool, str]] = InFlight()

    async def obtain(
        self, item: MediaItem, earlier: Sequence[MediaItem] = ()
    ) -> tuple[MediaItem, bool]:
        """The item with its embeddings, and whether they were computed for this call.

        `earlier`: the parts before, of a part of speech. Raises NotFound when the features have
        expired: the prompt must be tokenized again.
        """
        if item.kind not in self._tower.kinds:
            raise ProtocolError(f"the model has no tower for {item.kind}")
        key = BlobKey(f"{EMBEDDINGS_PREFIX}{self._tower.fingerprint}:{item.content_hash}")
        work = partial(self._provide, key, item, earlier)
        (was_computed, check), is_first = await self._in_flight.run(key, work)
        filled = msgspec.structs.replace(item, embeddings=key, embeddings_check=check)
        return filled, is_first and was_computed

    async def _provide(
        self, key: BlobKey, item: MediaItem, earlier: Sequence[MediaItem]
    ) -> tuple[bool, str]:
        """Make sure that the blob is in Redis for a full time to live.

        Returns whether it was computed, and its checksum; empty if another process computed it.
        """
        blob = self._cache.get(key)
        if await self._blobs.renew(key, self._ttl_s):
            return False, "" if blob is None else check_of(blob)
        is_new = blob is None
        if blob is None:
            try:
                blob = await self._compute(item)
            except StateLost:
                for part in _parts_before(item, earlier):
                    await self._compute(part)
                blob = await self._compute(item)
            self._cache.add(key, blob)
        await self._blobs.put(blob, key=key, ttl_s=self._ttl_s)
        return is_new, check_of(blob)

    async def _compute(self, item: MediaItem) -> bytes:
        try:
            tensors = tensor_blob.decode_named(await self._blobs.get(item.features))
        except NotFound as error:
            raise NotFound(
                f"the features of {_an(item.kind)} have expired: tokenize the prompt again",
                param="media",
            ) from error
        count = self._tower.encoder_states or item.num_embeddings
        part = None if item.follows is None else (item.follows, item.content_hash)
        features = Features(item.kind, tensors, count, part)
        self._tower.check(features)
        attributes: dict[str, str | int] = {
            "tokenmesh.kind": item.kind,
            "tokenmesh.embeddings": count,
        }
        with span("tower", attributes):
            return (await self._batcher.submit(features)).encode()


def _parts_before(item: MediaItem, earlier: Sequence[MediaItem]) -> list[MediaItem]:
    """All parts of the speech before one, the first one first. Raises ProtocolError."""
    by_hash = {each.content_hash: each for each in earlier}
    found, follows = [], item.follows
    while follows:
        part = by_hash.pop(follows, None)
        if part is None:
            raise ProtocolError("the parts of the speech before this one are missing")
        found.append(part)
        follows = part.follows
    return found[::-1]
