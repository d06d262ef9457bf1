"""Blobs: what is too large for a message travels by reference, through Redis, for a while.

Without a key of its own a blob is stored under the hash of its content, so that the same bytes are
stored once.
"""

import hashlib
from typing import Final

import xxhash

from tokenmesh.shared.config.mesh import RedisSettings
from tokenmesh.shared.errors import NotFound, PayloadTooLarge, ProtocolError
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.redis import Redis

PREFIX: Final = "tm:blob:"
_DIGEST_BYTES: Final = 16


def content_key(data: bytes) -> BlobKey:
    """The key of a blob that was put without one."""
    return BlobKey(hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest())


def check_of(data: bytes) -> str:
    """Detects a replaced blob; not proof against intent."""
    return xxhash.xxh3_64_hexdigest(data)


class Blobs:
    """The blob store. Calls raise Unavailable when Redis is away."""

    def __init__(self, redis: Redis, settings: RedisSettings) -> None:
        self._redis = redis
        self._settings = settings

    async def put(
        self, data: bytes, key: BlobKey | None = None, ttl_s: int | None = None
    ) -> BlobKey:
        """Store `data` for `ttl_s` (default: blob_ttl_s) from now on, replacing what was there.

        Raises PayloadTooLarge above max_blob_bytes.
        """
        limit = self._settings.max_blob_bytes
        if len(data) > limit:
            raise PayloadTooLarge(
                f"a blob of {len(data)} bytes is over the limit of {limit} (redis.max_blob_bytes)"
            )
        if key is None:
            key = content_key(data)
        ttl = self._settings.blob_ttl_s if ttl_s is None else ttl_s
        await self._redis.call("SET", PREFIX + key, data, "EX", ttl)
        return key

    async def get(self, key: BlobKey) -> bytes:
        """The bytes. Raises NotFound when they were never put or have expired."""
        data = await self._redis.call("GET", PREFIX + key)
        if data is None:
            raise NotFound(f"blob {key} does not exist or has expired")
        if not isinstance(data, bytes):
            raise ProtocolError(f"blob {key} is not a byte string")
        return data

    async def renew(self, key: BlobKey, ttl_s: int | None = None) -> bool:
        """Start the blob's time to live anew; False where there is no such blob."""
        ttl = self._settings.blob_ttl_s if ttl_s is None else ttl_s
        return await self._redis.call("EXPIRE", PREFIX + key, ttl) == 1

    async def remove(self, key: BlobKey) -> None:
        """Forget a blob; nothing happens when there is none."""
        await self._redis.call("DEL", PREFIX + key)

    async def exists(self, key: BlobKey) -> bool:
        return await self._redis.call("EXISTS", PREFIX + key) == 1
