"""The blob store and the Redis client against a real server."""

import asyncio
import time
from collections.abc import Callable

import pytest
from pydantic import SecretStr

from tests.servers import Server, redis_settings_of
from tokenmesh.shared.blobs import PREFIX, Blobs, content_key
from tokenmesh.shared.config.mesh import RedisSettings
from tokenmesh.shared.errors import (
    ConfigError,
    NotFound,
    PayloadTooLarge,
    TokenMeshError,
    Unavailable,
)
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.redis import open_redis


async def test_bytes_come_back_under_the_hash_of_their_content(blobs: Blobs) -> None:
    data = bytes(range(256)) * 1000
    key = await blobs.put(data)
    assert key == content_key(data)
    assert await blobs.put(bytes(data)) == key
    assert await blobs.get(key) == data
    assert await blobs.exists(key)


async def test_different_bytes_have_different_keys(blobs: Blobs) -> None:
    assert await blobs.put(b"one") != await blobs.put(b"two")


async def test_empty_blob_is_a_blob(blobs: Blobs) -> None:
    assert await blobs.get(await blobs.put(b"")) == b""


async def test_own_key_is_kept_and_its_bytes_replaced(blobs: Blobs) -> None:
    key = BlobKey("own-key")
    assert await blobs.put(b"first", key) == key
    assert await blobs.put(b"second", key) == key
    assert await blobs.get(key) == b"second"


async def test_unknown_blob_is_not_found(blobs: Blobs) -> None:
    key = BlobKey("never-put")
    assert not await blobs.exists(key)
    with pytest.raises(NotFound, match="never-put"):
        await blobs.get(key)


async def test_blob_lives_as_long_as_it_was_put_for(
    blobs: Blobs, redis_settings: RedisSettings
) -> None:
    redis = open_redis(redis_settings)
    key = await blobs.put(b"short", ttl_s=100)
    ttl = await redis.call("TTL", PREFIX + key)
    assert isinstance(ttl, int)
    assert 95 <= ttl <= 100
    await blobs.put(b"short")
    renewed = await redis.call("TTL", PREFIX + key)
    assert isinstance(renewed, int)
    assert renewed > redis_settings.blob_ttl_s - 5
    await redis.call("PEXPIRE", PREFIX + key, 0)
    with pytest.raises(NotFound):
        await blobs.get(key)
    await redis.close()


async def test_oversized_blob_is_refused(redis_settings: RedisSettings) -> None:
    settings = redis_settings.model_copy(update={"max_blob_bytes": 1024})
    redis = open_redis(settings)
    blobs = Blobs(redis, settings)
    assert await blobs.get(await blobs.put(b"x" * 1024)) == b"x" * 1024
    with pytest.raises(PayloadTooLarge):
        await blobs.put(b"x" * 1025)
    await redis.close()


async def test_absent_redis_is_unavailable_and_a_restarted_one_works(
    start_redis: Callable[[], Server],
) -> None:
    server = start_redis()
    settings = redis_settings_of(server)
    redis = open_redis(settings)
    blobs = Blobs(redis, settings)
    key = await blobs.put(b"lost with the server")
    server.stop()
    with pytest.raises(Unavailable):
        await blobs.get(key)
    server.start()
    with pytest.raises(NotFound):
        await blobs.get(key)
    await redis.close()


async def test_hanging_redis_costs_no_more_than_the_call_timeout() -> None:
    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(never_answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    redis = open_redis(RedisSettings(url=f"redis://127.0.0.1:{port}", call_timeout_s=0.2))
    started = time.perf_counter()
    with pytest.raises(Unavailable):
        await redis.call("PING")
    assert time.perf_counter() - started < 10.0
    await redis.close()
    server.close()
    await server.wait_closed()


async def test_pool_is_shared_by_more_calls_than_it_has_connections(
    redis_settings: RedisSettings,
) -> None:
    redis = open_redis(redis_settings.model_copy(update={"pool_size": 2}))
    replies = await asyncio.gather(*(redis.call("ECHO", str(number)) for number in range(50)))
    assert replies == [str(number).encode() for number in range(50)]
    await redis.close()


async def test_wrong_password_is_the_operators_mistake(redis_settings: RedisSettings) -> None:
    for password in (SecretStr("wrong"), None):
        redis = open_redis(redis_settings.model_copy(update={"password": password}))
        with pytest.raises(ConfigError):
            await redis.call("PING")
        await redis.close()


async def test_wrong_command_is_our_mistake(redis_settings: RedisSettings) -> None:
    redis = open_redis(redis_settings)
    with pytest.raises(TokenMeshError) as caught:
        await redis.call("NO-SUCH-COMMAND")
    assert not isinstance(caught.value, Unavailable)
    await redis.close()


async def test_many_commands_take_one_round_trip(redis_settings: RedisSettings) -> None:
    redis = open_redis(redis_settings)
    assert await redis.call_all([("SET", "t:a", "1"), ("INCR", "t:a"), ("GET", "t:a")]) == [
        b"OK",
        2,
        b"2",
    ]
    with pytest.raises(TokenMeshError):
        await redis.call_all([("SET", "t:b", "x"), ("INCR", "t:b")])
    await redis.close()


async def test_script_survives_that_redis_forgets_it(redis_settings: RedisSettings) -> None:
    redis = open_redis(redis_settings)
    add = redis.script("return redis.call('INCRBY', KEYS[1], ARGV[1])")
    await redis.call("DEL", "t:sum")
    assert await add(["t:sum"], [2]) == 2
    await redis.call("SCRIPT", "FLUSH")
    assert await add(["t:sum"], [3]) == 5
    assert await add(["t:sum"], [b"4"]) == 9
    await redis.close()
