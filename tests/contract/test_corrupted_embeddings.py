"""Wrong data where an encoder's embeddings should be: removed, and reported as worth a retry."""

import secrets
import struct

import pytest

from tokenmesh.services.worker_svc.preparation import fetch_embeddings
from tokenmesh.shared.blobs import PREFIX, Blobs, check_of
from tokenmesh.shared.config.mesh import RedisSettings
from tokenmesh.shared.errors import InvalidInput, TokenMeshError, Unavailable
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages.media import EMBEDDINGS_PREFIX, EMBEDS, IMAGE, MediaItem
from tokenmesh.shared.redis import open_redis
from tokenmesh.shared.tensor_blob import TensorBlob

HIDDEN, LENGTH = 4, 3


def blob_of(*values: float, width: int = HIDDEN) -> bytes:
    data = struct.pack(f"<{len(values)}f", *values)
    return TensorBlob("float32", (len(values) // width, width), data).encode()


GOOD = blob_of(*range(HIDDEN * LENGTH))
SPOILED = {
    "nothing": b"",
    "garbage": b"\xff" * 1000,
    "half": GOOD[: len(GOOD) // 2],
    "more": GOOD + b"x",
    "too short": blob_of(*range(HIDDEN * (LENGTH - 1))),
    "another width": blob_of(*range(LENGTH * 5), width=5),
    "other numbers": blob_of(*range(1, HIDDEN * LENGTH + 1)),
}


def item_of(kind: str = IMAGE, prefix: str = EMBEDDINGS_PREFIX) -> MediaItem:
    key = BlobKey(f"{prefix}{secrets.token_hex(8)}")
    return MediaItem(
        kind=kind,
        content_hash=key,
        offset=0,
        length=LENGTH,
        pixels=key,
        embeddings=key,
        embeddings_check=check_of(GOOD),
    )


async def fetch(item: MediaItem, blobs: Blobs) -> bytes:
    found = await fetch_embeddings([item], blobs, HIDDEN, 5.0)
    return found[item.content_hash].encode()


@pytest.mark.parametrize("kind", SPOILED)
async def test_corrupted_embeddings_are_removed(blobs: Blobs, kind: str) -> None:
    item = item_of()
    assert item.embeddings is not None
    await blobs.put(GOOD, item.embeddings)
    assert await fetch(item, blobs) == GOOD
    await blobs.put(SPOILED[kind], item.embeddings)
    with pytest.raises(Unavailable, match="corrupted"):
        await fetch(item, blobs)
    assert not await blobs.exists(item.embeddings)


async def test_so_is_what_is_no_string(blobs: Blobs, redis_settings: RedisSettings) -> None:
    item = item_of()
    assert item.embeddings is not None
    redis = open_redis(redis_settings)
    await redis.call("RPUSH", PREFIX + item.embeddings, "a")
    await redis.close()
    with pytest.raises(Unavailable, match="corrupted"):
        await fetch(item, blobs)
    assert not await blobs.exists(item.embeddings)


async def test_what_clients_have_brought_stays_and_is_their_mistake(blobs: Blobs) -> None:
    item = item_of(EMBEDS, "")
    assert item.embeddings is not None
    await blobs.put(SPOILED["too short"], item.embeddings)
    with pytest.raises(InvalidInput):
        await fetch(item, blobs)
    await blobs.put(SPOILED["garbage"], item.embeddings)
    with pytest.raises(TokenMeshError):
        await fetch(item, blobs)
    assert await blobs.exists(item.embeddings)


async def test_a_forged_key_removes_nothing(blobs: Blobs) -> None:
    item = item_of(prefix="file-")
    assert item.embeddings is not None
    await blobs.put(SPOILED["garbage"], item.embeddings)
    with pytest.raises(Unavailable):
        await fetch(item, blobs)
    assert await blobs.exists(item.embeddings)
