"""PoolMesh: a real gateway over a bus, with a fake worker that answers Pool messages."""

import random
from array import array
from collections.abc import Callable
from typing import Any

import httpx
import numpy

from tests.fakes.back_end import BackEnd, fake_tokenizer
from tests.fakes.worker import FakeWorker
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.messages import Message, Pool, PoolAnswer
from tokenmesh.shared.messages.pooling import Pooled, PoolItem, PoolTask
from tokenmesh.shared.tokens import count_ids, pack_ids

SIZE = 16
"""Width of the fake embeddings."""
CACHED = 2
"""Tokens of each batch that count as cached."""


def numbers(seed: str, size: int = SIZE) -> list[float]:
    """Numbers that only depend on the seed, as float32 holds them."""
    source = random.Random(seed)
    return array("f", (source.uniform(-1, 1) for _ in range(size))).tolist()


def pooled_of(item: PoolItem, task: PoolTask, dimensions: int | None = None) -> Pooled:
    """The answer to an item: made of its ids and type ids."""
    seed, size = f"{item.prompt_ids.hex()} {item.type_ids.hex()}", dimensions or SIZE
    if task == "score":
        return Pooled([1], array("f", numbers(seed, 1)).tobytes())
    if task in ("token_embed", "token_classify"):
        rows = [numbers(f"{seed} {row}", size) for row in range(count_ids(item.prompt_ids))]
        return Pooled([len(rows), size], b"".join(array("f", row).tobytes() for row in rows))
    return Pooled([size], array("f", numbers(seed, size)).tobytes())


def answer_of(pool: Pool) -> PoolAnswer:
    """Return the answer of a worker without faults."""
    params = pool.params
    found = [pooled_of(item, params.task, params.dimensions) for item in pool.items]
    return PoolAnswer(pooled=found, cached_tokens=CACHED)


class PoolMesh(BackEnd):
    """Use as `async with`; `tasks` are those of its one model."""

    def __init__(
        self,
        bus: BusSettings,
        redis: RedisSettings,
        *tasks: PoolTask,
        card: dict[str, Any] | None = None,
        **limits: Any,
    ) -> None:
        """`card`: further fields of the model's card; `limits`: the gateway's settings."""
        super().__init__(bus, redis, **limits)
        self.card_fields = {
            "tasks": list(tasks),
            "generates": False,
            "pooled_size": SIZE,
            **(card or {}),
        }
        self.answer: Callable[[Pool], Message | None] = answer_of

    async def __aenter__(self) -> "PoolMesh":
        await super().__aenter__()
        return self

    async def add_worker(self, script: Any = None) -> FakeWorker:
        worker = await super().add_worker(script)
        worker.pool = lambda pool: self.answer(pool)
        return worker

    @property
    def pools(self) -> list[Pool]:
        """Every Pool that any worker has received."""
        return [pool for worker in self.workers for pool in worker.pools]


def tokens(text: str) -> list[int]:
    """The ids of a text."""
    ids: list[int] = fake_tokenizer().encode(text).ids
    return ids


def expected(text: str | list[int], task: PoolTask = "embed", dims: int | None = None) -> Any:
    """Return the numbers that the fake worker computes for a text or for ids."""
    ids = text if isinstance(text, list) else tokens(text)
    pooled = pooled_of(PoolItem(prompt_ids=pack_ids(ids)), task, dims)
    return numpy.frombuffer(pooled.data, "<f4").reshape(pooled.shape).tolist()


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    """The body of a response that succeeds."""
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def refused(client: httpx.AsyncClient, path: str, **body: Any) -> tuple[int, Any]:
    """Status and error of a response that fails."""
    response = await client.post(path, json=body)
    return response.status_code, response.json()["error"]
