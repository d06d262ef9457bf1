"""Requests for numbers while workers die, hang, refuse and lie, and while clients disconnect."""

import asyncio
from array import array
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.fakes.pool_mesh import SIZE, PoolMesh, answer_of
from tokenmesh.shared.blobs import check_of
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.errors import Draining, InvalidInput
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages import Message, Pool, PoolAnswer, Refused
from tokenmesh.shared.messages.failed import to_failed
from tokenmesh.shared.messages.pooling import Pooled

TEXTS = [f"text {index}" for index in range(40)]


@pytest.fixture
async def mesh(bus_settings: BusSettings, redis_settings: RedisSettings) -> AsyncIterator[PoolMesh]:
    async with PoolMesh(
        bus_settings, redis_settings, "embed", "token_embed", pool_batch_tokens=16
    ) as running:
        await running.add_worker()
        yield running


@pytest.fixture
async def client(mesh: PoolMesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=10) as connected:
        yield connected


async def embeddings(client: httpx.AsyncClient) -> Any:
    response = await client.post("/v1/embeddings", json={"input": TEXTS})
    assert response.status_code == 200, response.text
    return [each["embedding"] for each in response.json()["data"]]


def retries(mesh: PoolMesh) -> dict[str, float]:
    """The metric `pool_retries` by its label."""
    lines = mesh.metrics.render().decode().splitlines()
    found = [line for line in lines if line.startswith("tokenmesh:pool_retries_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in found}


async def test_a_batch_moves_when_its_worker_dies(
    mesh: PoolMesh, client: httpx.AsyncClient
) -> None:
    wanted = await embeddings(client)
    first, second = mesh.workers

    def die(_: Pool) -> Message | None:
        asyncio.create_task(first.die())  # noqa: RUF006
        return None

    first.pool = die
    assert await embeddings(client) == wanted
    assert second.pools
    assert retries(mesh) == {"lost": 8.0}
    assert {pool.attempt for pool in second.pools} >= {1}


async def test_a_batch_moves_when_its_worker_hangs(
    mesh: PoolMesh, client: httpx.AsyncClient
) -> None:
    wanted = await embeddings(client)
    mesh.workers[0].faults.is_deaf = True
    assert await embeddings(client) == wanted
    assert set(retries(mesh)) == {"lost"}


async def test_a_worker_that_is_slow_again_and_again_counts_as_one(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        PoolMesh(bus_settings, redis_settings, "embed", ping_timeout_s=0.02) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=15) as client,
    ):
        slow = mesh.workers[0]
        slow.faults.is_deaf = True
        asking = asyncio.create_task(client.post("/v1/embeddings", json={"input": "a"}))
        await mesh.until(lambda: retries(mesh).get("lost", 0.0) >= 5.0)
        slow.faults.is_deaf = False
        assert (await asking).status_code == 200


async def test_a_slow_worker_that_answers_pings_keeps_its_batch(
    mesh: PoolMesh, client: httpx.AsyncClient
) -> None:
    first = mesh.workers[0]
    kept: list[Any] = []

    async def later(envelope: Any) -> None:
        await asyncio.sleep(0.6)
        await first._bus.reply(envelope, answer_of(envelope.message))

    receive = first._receive

    async def delayed(envelope: Any) -> None:
        if isinstance(envelope.message, Pool):
            kept.append(asyncio.create_task(later(envelope)))
        else:
            await receive(envelope)

    for subscription in first._subscriptions:
        await subscription.stop()
    first._receive = delayed  # type: ignore[method-assign]
    await first.start()
    await embeddings(client)
    assert kept
    assert not mesh.workers[1].pools
    assert retries(mesh) == {}


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Refused(reason="full", retry_after_s=0.1), "refused"),
        (to_failed(Draining("leaving")), "draining"),
    ],
)
async def test_a_batch_moves_when_its_worker_refuses(
    mesh: PoolMesh, client: httpx.AsyncClient, answer: Message, kind: str
) -> None:
    wanted = await embeddings(client)
    mesh.workers[0].pool = lambda _: answer
    assert await embeddings(client) == wanted
    assert set(retries(mesh)) == {kind}


async def test_prompts_that_kill_every_worker_are_given_up(
    mesh: PoolMesh, client: httpx.AsyncClient
) -> None:
    for worker in mesh.workers:
        worker.pool = lambda _: to_failed(Draining("leaving"))
    for worker in mesh.workers:
        await worker.die()
    response = await client.post("/v1/embeddings", json={"input": "a"})
    assert response.status_code == 503
    assert "workers in a row have lost the prompts" in response.json()["error"]["message"]


async def test_an_error_of_the_request_is_not_repeated(
    mesh: PoolMesh, client: httpx.AsyncClient
) -> None:
    failed = to_failed(InvalidInput("dimensions are fixed", param="dimensions"))
    mesh.workers[0].pool = lambda _: failed
    response = await client.post("/v1/embeddings", json={"input": "a", "dimensions": 3})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "dimensions"
    assert len(mesh.pools) == 1


def numbers(count: int, value: float = 0.5) -> bytes:
    return array("f", [value] * count).tobytes()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (PoolAnswer(pooled=[]), "0 answers to 1 prompts"),
        (PoolAnswer(pooled=[Pooled([SIZE], b"")]), "0 bytes for numbers"),
        (PoolAnswer(pooled=[Pooled([2, SIZE], numbers(2 * SIZE))]), "numbers of the shape"),
        (PoolAnswer(pooled=[Pooled([0], b"")]), "numbers of the shape"),
        (PoolAnswer(pooled=[Pooled([SIZE], numbers(SIZE, float("nan")))]), "not finite"),
        (PoolAnswer(pooled=[Pooled([SIZE], numbers(SIZE, float("-inf")))]), "not finite"),
    ],
)
async def test_an_impossible_answer_is_an_error(
    mesh: PoolMesh, client: httpx.AsyncClient, answer: Message, message: str
) -> None:
    for worker in mesh.workers:
        worker.pool = lambda _: answer
    response = await client.post("/v1/embeddings", json={"input": "a"})
    assert response.status_code == 500
    assert message in response.json()["error"]["message"]


async def test_workers_that_are_all_full_are_a_429(
    mesh: PoolMesh, client: httpx.AsyncClient
) -> None:
    mesh.answer = lambda _: Refused(reason="full", retry_after_s=3.0)
    response = await client.post("/v1/embeddings", json={"input": "a"})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert len(mesh.pools) == 3


async def test_large_numbers_come_by_the_blob_store(
    mesh: PoolMesh, client: httpx.AsyncClient
) -> None:
    wanted = (await client.post("/pooling", json={"input": "a fox"})).json()["data"]
    keys: list[BlobKey] = []
    first = mesh.workers[0]
    plain = first._receive

    async def with_blobs(envelope: Any) -> None:
        if not isinstance(envelope.message, Pool):
            await plain(envelope)
            return
        found = []
        for pooled in answer_of(envelope.message).pooled:
            key = await mesh.blobs.put(pooled.data, BlobKey(f"pooled:{len(keys)}"))
            keys.append(key)
            # The first blob is lost.
            if len(keys) == 1:
                await mesh.blobs.remove(key)
            found.append(Pooled(pooled.shape, b"", key, check_of(pooled.data)))
        await first._bus.reply(envelope, PoolAnswer(pooled=found))

    for subscription in first._subscriptions:
        await subscription.stop()
    first._receive = with_blobs  # type: ignore[method-assign]
    await first.start()
    await mesh.workers[1].die()
    response = await client.post("/pooling", json={"input": "a fox"})
    assert response.json()["data"] == wanted
    assert len(keys) == 2
    assert not await mesh.blobs.exists(keys[1])


async def test_a_client_that_disconnects_cancels_its_batches(
    mesh: PoolMesh, client: httpx.AsyncClient
) -> None:
    mesh.workers[0].pool = lambda _: None
    request = asyncio.create_task(client.post("/v1/embeddings", json={"input": TEXTS}))
    await mesh.until(lambda: len(mesh.workers[0].pools) == 8)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await mesh.until(lambda: len(mesh.workers[0].cancels) == 8)
    sent = {(pool.gateway, pool.stream, pool.attempt) for pool in mesh.workers[0].pools}
    cancelled = {(each.gateway, each.stream, each.attempt) for each in mesh.workers[0].cancels}
    assert cancelled == sent


async def test_the_deadline_of_a_request_holds(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        PoolMesh(bus_settings, redis_settings, "embed", request_timeout_s=1.5) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        mesh.workers[0].pool = lambda _: None
        response = await client.post("/v1/embeddings", json={"input": "a"})
        assert response.status_code == 504
        await mesh.until(lambda: bool(mesh.workers[0].cancels))


async def test_sizes_are_bounded_before_anything_is_computed(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        PoolMesh(
            bus_settings,
            redis_settings,
            "embed",
            "token_embed",
            max_pool_inputs=5,
            max_pool_text_chars=100,
            max_pool_tokens=64,
            max_pool_values=SIZE * 20,
            max_described_inputs=2,
        ) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        each = {"task": "token_embed"}
        for path, body, status, message in (
            ("/v1/embeddings", {"input": ["a"] * 6}, 400, "input holds 6 prompts, at most 5"),
            ("/v1/embeddings", {"input": [[1]] * 6}, 400, "input holds 6 prompts, at most 5"),
            ("/rerank", {"query": "a", "documents": ["a"] * 6}, 400, "documents holds 6"),
            ("/v1/embeddings", {"input": ["a", "b" * 101]}, 413, "input[1] has 101 characters"),
            ("/v1/embeddings", {"input": [[1] * 65]}, 413, "more than 64 tokens"),
            ("/v1/embeddings", {"input": ["0 1 2 3 4 5 6 7 8 9 " * 4] * 2}, 413, "more than 64"),
            ("/pooling", {"input": [[1] * 21], **each}, 413, "336 numbers, at most 320"),
            ("/v1/embeddings", {"input": ["a"] * 3, "encoding_format": "bytes"}, 400, "bytes_only"),
        ):
            response = await client.post(path, json=body)
            assert response.status_code == status, response.text
            assert message in response.json()["error"]["message"]
        assert mesh.pools == []


async def test_a_tenant_waits_for_room_for_large_answers(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        PoolMesh(
            bus_settings,
            redis_settings,
            "token_embed",
            card={"pooled_size": 1024, "max_model_len": 64},
            pool_budget_bytes=256 * 1024,
            body_wait_s=0.2,
        ) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        mesh.workers[0].pool = lambda _: None
        body = {"input": [list(range(1, 33))]}
        first = asyncio.create_task(client.post("/pooling", json=body))
        await mesh.until(lambda: bool(mesh.pools))
        response = await client.post("/pooling", json=body)
        assert response.status_code == 429
        assert "too many large answers" in response.json()["error"]["message"]
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await mesh.until(lambda: bool(mesh.workers[0].cancels))
        waiting = asyncio.create_task(client.post("/pooling", json=body))
        await mesh.until(lambda: len(mesh.pools) == 2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
