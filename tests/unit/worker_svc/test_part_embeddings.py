"""Embeddings of parts of speech are fetched once by a worker, within its bytes."""

import asyncio

from tokenmesh.services.worker_svc.part_embeddings import PartEmbeddings
from tokenmesh.services.worker_svc.preparation import fetch_embeddings
from tokenmesh.shared.blobs import Blobs, check_of
from tokenmesh.shared.config.mesh import RedisSettings
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages.media import ADD, AUDIO, MediaItem
from tokenmesh.shared.redis import open_redis
from tokenmesh.shared.tensor_blob import TensorBlob

HIDDEN = 4


def blob(value: int, rows: int = 2) -> TensorBlob:
    return TensorBlob("float32", (rows, HIDDEN), bytes([value]) * (rows * HIDDEN * 4))


def test_the_least_recently_used_leave_first() -> None:
    kept = PartEmbeddings(max_bytes=3 * 32)
    keys = [BlobKey(name) for name in "abcd"]
    for number, key in enumerate(keys[:3]):
        kept.add(key, blob(number))
    assert kept.get(keys[0]) == blob(0)
    kept.add(keys[3], blob(3))
    assert [kept.get(key) is None for key in keys] == [False, True, False, False]
    kept.add(keys[1], blob(1, rows=9))
    assert (kept.get(keys[1]), kept.num_bytes) == (None, 3 * 32)


async def test_a_part_is_fetched_once_and_other_items_each_time(
    redis_settings: RedisSettings,
) -> None:
    redis, kept = open_redis(redis_settings), PartEmbeddings(max_bytes=1 << 20)
    blobs = Blobs(redis, redis_settings)
    items = []
    for number, follows in enumerate(("", "0", None)):
        data, key = blob(number).encode(), BlobKey(f"emb:part {number}")
        await blobs.put(data, key=key)
        items.append(
            MediaItem(
                kind=AUDIO,
                content_hash=str(number),
                offset=2 * number,
                length=2,
                embeddings=key,
                embeddings_check=check_of(data),
                combine=ADD,
                follows=follows,
            )
        )
    first = await fetch_embeddings(items, blobs, HIDDEN, 5.0, parts=kept)
    assert [first[str(number)] for number in range(3)] == [blob(number) for number in range(3)]
    await asyncio.gather(*(blobs.remove(BlobKey(f"emb:part {number}")) for number in range(2)))
    again = await fetch_embeddings(items, blobs, HIDDEN, 5.0, parts=kept)
    assert again == first
    await redis.close()
