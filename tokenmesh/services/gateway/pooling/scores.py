"""Scores of pairs of texts, by what the model can: pairs, embeddings, or late interaction."""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from tokenmesh.services.gateway.http.errors import NotSupported
from tokenmesh.services.gateway.http.event_loop import off_loop
from tokenmesh.services.gateway.http.sse import encode_json
from tokenmesh.services.gateway.pooling.fields import RerankRequest, ScoreRequest
from tokenmesh.services.gateway.pooling.numbers import add_list, rows_of
from tokenmesh.services.gateway.pooling.response import CHARS_PER_VALUE, NumbersBody
from tokenmesh.services.gateway.pooling.run import PoolRun
from tokenmesh.services.gateway.pooling.shapes import (
    ApiVersion,
    BilledUnits,
    CohereMeta,
    RankedDocument,
    RankedResult,
    RerankResponse,
    RerankUsage,
    Score,
    ScoreList,
)
from tokenmesh.shared.errors import FieldPath, InvalidInput, ProtocolError, field_name
from tokenmesh.shared.messages.pooling import Pooled, PoolItem, PoolTask
from tokenmesh.shared.telemetry import REQUEST_ID, span

SCORE_TASKS: tuple[PoolTask, ...] = ("score", "embed", "token_embed")
"""The first one that the model has makes its scores."""
_FIRST_NAMES = ("text_1", "data_1", "queries")
_SECOND_NAMES = {
    "text_1": ("text_2",),
    "data_1": ("data_2",),
    "queries": ("documents", "items"),
}


class Pairs:
    """The texts of a request: one first text for all pairs, or one for each."""

    def __init__(self, first: "_Side", second: "_Side") -> None:
        self.first = first
        self.second = second
        if len(first.texts) not in (1, len(second.texts)):
            raise InvalidInput(
                f"{first.name} holds {len(first.texts)} texts and {second.name} "
                f"{len(second.texts)}: send one, or as many",
                param=second.name,
            )

    def path_of(self, kind: str, index: int) -> FieldPath:
        """The client's field of a text."""
        side = self.first if kind == "texts" else self.second
        if len(side.texts) == 1:
            index = 0
        return (side.name, index) if side.is_list else (side.name,)


class _Side:
    def __init__(self, name: str, given: Any) -> None:
        self.name = name
        self.is_list = isinstance(given, list)
        values = given if self.is_list else [given]
        if not values:
            raise InvalidInput(f"{name} is empty", param=name)
        self.texts: list[str] = []
        for index, each in enumerate(values):
            path: FieldPath = (name, index) if self.is_list else (name,)
            self.texts.append(each if isinstance(each, str) else text_of(each, path))


def text_of(given: dict[str, Any], path: FieldPath) -> str:
    """The text of an object with `text`, or with a list `content` of parts of type text."""
    name = field_name(path)
    text = given.get("text")
    if isinstance(text, str):
        return text
    content = given.get("content")
    if not isinstance(content, list) or not content:
        raise InvalidInput(f"{name} must be a string or an object with a text", param=name)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise NotSupported(
                f"{name}: parts of type {str(kind)[:40]!r} are not supported yet, send text",
                param=name,
            )
        if not isinstance(part.get("text"), str):
            raise InvalidInput(f"{name}: a part of type text has no text", param=name)
        texts.append(part["text"])
    return "\n".join(texts)


def score_pairs(body: ScoreRequest) -> Pairs:
    """The two sides, by any of their names. Raises InvalidInput."""
    for name in _FIRST_NAMES:
        first = getattr(body, name)
        if first is None:
            continue
        for other in _SECOND_NAMES[name]:
            second = getattr(body, other)
            if second is not None:
                return Pairs(_Side(name, first), _Side(other, second))
        missing = " or ".join(_SECOND_NAMES[name])
        raise InvalidInput(f"{missing} is missing", param=_SECOND_NAMES[name][0])
    raise InvalidInput("text_1 is missing", param="text_1")


def rerank_pairs(body: RerankRequest) -> Pairs:
    """The query with each document. Raises InvalidInput."""
    return Pairs(_Side("query", body.query), _Side("documents", body.documents))


async def scores_of(run: PoolRun, pairs: Pairs) -> list[float]:
    """One for each pair. Raises InvalidInput and what tokenizers and workers raise."""
    if run.job.params.task == "score":
        items = await run.services.tokenizer.texts(
            run.job, pairs.first.texts, pairs.path_of, pairs=pairs.second.texts
        )
        await run.reserve(items)
        return [_single(pooled) for pooled in await run.compute(items)]
    return await _compared(run, pairs)


def _single(pooled: Pooled) -> float:
    (row,) = rows_of(pooled)
    if len(row) != 1:
        raise ProtocolError(f"{len(row)} numbers for the score of a pair")
    return row[0]


async def _compared(run: PoolRun, pairs: Pairs) -> list[float]:
    """By the similarity of numbers that are computed for each text alone."""
    firsts = await _items(run, pairs, "texts")
    seconds = await _items(run, pairs, "pairs")
    # Numbers of second texts are dropped batch by batch.
    await run.reserve(firsts)
    queries = await run.compute(firsts)
    scores = [0.0] * len(seconds)
    async with aclosing(run.batches(seconds)) as batches:
        async for indices, found in batches:
            with span("compare", {REQUEST_ID: run.job.request_id, "tokenmesh.items": len(found)}):
                values = await off_loop(
                    True, _compare, run.job.params.task, queries, indices, found
                )
            for index, value in zip(indices, values, strict=True):
                scores[index] = value
    return scores


async def _items(run: PoolRun, pairs: Pairs, kind: str) -> list[PoolItem]:
    side = pairs.first if kind == "texts" else pairs.second

    def path_of(_kind: str, index: int) -> FieldPath:
        return pairs.path_of(kind, index)

    return await run.services.tokenizer.texts(
        run.job, side.texts, path_of, are_second=kind == "pairs"
    )


def _compare(
    task: PoolTask, queries: Sequence[Pooled], indices: Sequence[int], found: list[Pooled]
) -> list[float]:
    # numpy is imported when it is first needed, in this thread.
    from tokenmesh.services.gateway.pooling import arrays

    compare: Callable[[Pooled, list[Pooled]], list[float]]
    compare = arrays.cosines if task == "embed" else arrays.max_sims
    if len(queries) == 1:
        return compare(queries[0], found)
    return [compare(queries[index], [each])[0] for index, each in zip(indices, found, strict=True)]


async def score(pairs: Pairs, run: PoolRun, body: NumbersBody) -> None:
    """Fill the body with the score of each pair."""
    scores = await scores_of(run, pairs)
    frame = ScoreList(
        id=run.context.request_id,
        created=run.job.created,
        model=run.job.card.name,
        data=[],
        usage=run.usage,
    )
    rows = [partial(_score, index, value) for index, value in enumerate(scores)]
    add_list(body, frame, 1, rows)


def _score(index: int, value: float) -> bytes:
    return encode_json(Score(index=index, score=value))


async def rerank(request: RerankRequest, pairs: Pairs, run: PoolRun, body: NumbersBody) -> None:
    """Fill the body with the best documents first, equal ones in the request's order."""
    scores = await scores_of(run, pairs)
    order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
    texts = None if request.return_documents is False else pairs.second.texts
    frame = RerankResponse(
        id=run.context.request_id,
        model=run.job.card.name,
        usage=RerankUsage(run.usage.prompt_tokens, run.usage.total_tokens),
        results=[],
        meta=CohereMeta(api_version=ApiVersion(), billed_units=BilledUnits(search_units=1)),
    )
    shown = order[: request.top_n or len(order)]
    rows = [partial(_result, index, scores[index], texts) for index in shown]
    num_chars = 0 if texts is None else sum(len(texts[index]) for index in shown)
    # Texts are written as fast as numbers are at some eight characters each.
    add_list(body, frame, 1 + num_chars // (CHARS_PER_VALUE * len(shown)), rows, b"results")


def _result(index: int, value: float, texts: Sequence[str] | None) -> bytes:
    result = RankedResult(index=index, relevance_score=value)
    if texts is not None:
        result.document = RankedDocument(texts[index])
    return encode_json(result)
