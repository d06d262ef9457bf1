"""Embeddings in the shapes of Ollama's /api/embed and /api/embeddings."""

from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec

from tokenmesh.services.gateway.http.sse import encode_json
from tokenmesh.services.gateway.ollama.writer import nanoseconds
from tokenmesh.services.gateway.pooling.fields import EmbeddingRequest
from tokenmesh.services.gateway.pooling.inputs import read_items
from tokenmesh.services.gateway.pooling.numbers import add_list, rows_of
from tokenmesh.services.gateway.pooling.run import NumbersBody, PoolRun
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.messages.pooling import Pooled

WHOLE_MODEL: Final = -1
"""As truncate_prompt_tokens: cut to what the model takes."""


class OllamaEmbeddings(msgspec.Struct, kw_only=True):
    """The body of /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct):
    """The body of /api/embeddings."""

    embedding: list[float]


async def embed(request: EmbeddingRequest, model: str, run: PoolRun, body: NumbersBody) -> None:
    """Fill the body with the embeddings of all texts."""
    found = await _compute(request, run)
    frame = OllamaEmbeddings(
        model=model,
        embeddings=[],
        total_duration=nanoseconds(monotonic_s() - run.context.started_s),
        prompt_eval_count=run.usage.prompt_tokens,
    )
    rows = [partial(_row, pooled) for pooled in found]
    add_list(body, frame, found[0].shape[0], rows, b"embeddings")


async def embed_one(request: EmbeddingRequest, run: PoolRun, body: NumbersBody) -> None:
    """Fill the body with the embedding of one text."""
    (pooled,) = await _compute(request, run)
    body.add(b'{"embedding":')
    body.add_rows(pooled.shape[0], [partial(_row, pooled)], b",")
    body.add(b"}")


async def _compute(request: EmbeddingRequest, run: PoolRun) -> Sequence[Pooled]:
    items = await read_items(run, request)
    await run.reserve(items)
    return await run.compute(items)


def _row(pooled: Pooled) -> bytes:
    (row,) = rows_of(pooled)
    return encode_json(row)
