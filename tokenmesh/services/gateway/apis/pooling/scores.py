"""Scores of pairs of texts, by what the model can: pairs, embeddings, or late interaction."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import msgspec

from tokenmesh.services.gateway.apis.openai.translation import FieldNames
from tokenmesh.services.gateway.apis.pooling.fields import RerankRequest, ScoreFields, ScoreRequest
from tokenmesh.services.gateway.apis.pooling.inputs import Side
from tokenmesh.services.gateway.apis.pooling.job_builder import (
    Messages,
    check_number_of_media,
    media_options,
)
from tokenmesh.services.gateway.apis.pooling.numbers import add_list, frame_of, rows_of
from tokenmesh.services.gateway.apis.pooling.shapes import (
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
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid
from tokenmesh.services.gateway.core.http.event_loop import off_loop
from tokenmesh.services.gateway.core.http.sse import encode_json
from tokenmesh.services.gateway.core.pooling.job import PoolJob
from tokenmesh.services.gateway.core.pooling.run import CHARS_PER_VALUE, NumbersBody, PoolRun
from tokenmesh.shared.errors import FieldPath, InvalidInput, ProtocolError
from tokenmesh.shared.messages.pooling import Pooled, PoolTask
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
    """The texts or images of a request: one first one for all pairs, or one for each."""

    def __init__(self, first: Side, second: Side, body: ScoreFields) -> None:
        self.media_options = media_options(body)
        self.first = first
        self.second = second
        if len(first) not in (1, len(second)):
            raise InvalidInput(
                f"{first.name} holds {len(first)} texts and {second.name} "
                f"{len(second)}: send one, or as many",
                param=second.name,
            )

    def path_of(self, kind: str, index: int) -> FieldPath:
        """The client's field of a text."""
        side = self.first if kind == "texts" else self.second
        return side.path_of(0 if len(side) == 1 else index)

    @property
    def chats(self) -> list[Messages]:
        """Conversations of one message with an image."""
        return [*self.first.chats.values(), *self.second.chats.values()]


def score_pairs(body: ScoreRequest) -> Pairs:
    """The two sides, by any of their names. Raises InvalidInput."""
    for name in _FIRST_NAMES:
        first = getattr(body, name)
        if first is None:
            continue
        for other in _SECOND_NAMES[name]:
            second = getattr(body, other)
            if second is not None:
                return Pairs(Side(name, first), Side(other, second), body)
        missing = " or ".join(_SECOND_NAMES[name])
        raise InvalidInput(f"{missing} is missing", param=_SECOND_NAMES[name][0])
    raise invalid("text_1", "is missing")


def rerank_pairs(body: RerankRequest) -> Pairs:
    """The query with each document. Raises InvalidInput."""
    return Pairs(Side("query", body.query), Side("documents", body.documents), body)


def scoring_job(job: PoolJob, body: ScoreFields) -> PoolJob:
    """The job with what scores have besides. Raises NotSupported."""
    kwargs = body.template_kwargs
    for name in ("instruction", "chat_template", "chat_template_kwargs"):
        if job.params.task != "score" and getattr(body, name) is not None:
            raise NotSupported(
                f"{name}: the model {job.card.name!r} compares {job.params.task} of each text; "
                "templates are for models that score pairs",
                param=name,
            )
    return replace(
        job,
        max_text_tokens=body.max_tokens_per_query or None,
        max_pair_tokens=body.max_tokens_per_doc or None,
        pair_template=body.chat_template,
        pair_kwargs=None if kwargs is None else msgspec.json.encode(kwargs),
    )


def template_names(body: ScoreFields) -> FieldNames:
    """The client's name of what tokenizers call `chat_template_kwargs`."""
    is_alone = body.instruction is not None and body.chat_template_kwargs is None
    return FieldNames({"chat_template_kwargs": "instruction"} if is_alone else {}, {})


async def scores_of(run: PoolRun, pairs: Pairs) -> list[float]:
    """One for each pair. Raises InvalidInput and what tokenizers and workers raise."""
    if run.job.params.task == "score":
        firsts, seconds = pairs.first.only_texts(), pairs.second.only_texts()
        items = await run.services.tokenizer.texts(run.job, firsts, pairs.path_of, pairs=seconds)
        await run.reserve(items)
        return [_single(pooled) for pooled in await run.compute(items)]
    check_number_of_media(pairs.chats, run.services.settings)
    return await _compared(run, pairs)


def _single(pooled: Pooled) -> float:
    (row,) = rows_of(pooled)
    if len(row) != 1:
        raise ProtocolError(f"{len(row)} numbers for the score of a pair")
    return row[0]


async def _compared(run: PoolRun, pairs: Pairs) -> list[float]:
    """By the similarity of numbers that are computed for each text or image alone."""
    options = pairs.media_options
    firsts = await pairs.first.items(run, options)
    seconds = await pairs.second.items(run, options, are_second=True)
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


def _compare(
    task: PoolTask, queries: Sequence[Pooled], indices: Sequence[int], found: list[Pooled]
) -> list[float]:
    # numpy is imported when it is first needed, in this thread.
    from tokenmesh.services.gateway.core.pooling import arrays

    compare: Callable[[Pooled, list[Pooled]], list[float]]
    compare = arrays.cosines if task == "embed" else arrays.max_sims
    if len(queries) == 1:
        return compare(queries[0], found)
    return [compare(queries[index], [each])[0] for index, each in zip(indices, found, strict=True)]


async def score(pairs: Pairs, run: PoolRun, body: NumbersBody) -> None:
    """Fill the body with the score of each pair."""
    scores = await scores_of(run, pairs)
    rows = [partial(_score, index, value) for index, value in enumerate(scores)]
    add_list(body, frame_of(ScoreList, run), 1, rows)


def _score(index: int, value: float) -> bytes:
    return encode_json(Score(index=index, score=value))


async def rerank(request: RerankRequest, pairs: Pairs, run: PoolRun, body: NumbersBody) -> None:
    """Fill the body with the best documents first, equal ones in the request's order."""
    scores = await scores_of(run, pairs)
    order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
    texts = {} if request.return_documents is False else pairs.second.texts
    frame = RerankResponse(
        id=run.context.answer_id,
        model=run.job.card.requested_name,
        usage=RerankUsage(run.usage.prompt_tokens, run.usage.total_tokens),
        results=[],
        meta=CohereMeta(api_version=ApiVersion(), billed_units=BilledUnits(search_units=1)),
    )
    shown = order[: request.top_n or len(order)]
    rows = [partial(_result, index, scores[index], texts) for index in shown]
    num_chars = sum(len(texts.get(index, "")) for index in shown)
    # Texts are written as fast as numbers are at some eight characters each.
    add_list(body, frame, 1 + num_chars // (CHARS_PER_VALUE * len(shown)), rows, b"results")


def _result(index: int, value: float, texts: Mapping[int, str]) -> bytes:
    result = RankedResult(index=index, relevance_score=value)
    if index in texts:
        result.document = RankedDocument(texts[index])
    return encode_json(result)
