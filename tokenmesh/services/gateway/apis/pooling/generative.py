"""Scores by the next token of a model that generates: vLLM's /generative_scoring.

Each item behind the query is a prompt, and its score is how likely the first label is to follow.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, Final

import msgspec
from pydantic import Field

from tokenmesh.services.gateway.apis.openai.completion_builder import build_completion
from tokenmesh.services.gateway.apis.openai.request import CompletionRequest
from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.apis.openai.translation import FieldNames
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.generation.chunk import OutputChunk, merge
from tokenmesh.services.gateway.core.generation.delivery import Delivery
from tokenmesh.services.gateway.core.generation.request import GenerationRequest, Head
from tokenmesh.services.gateway.core.generation.usage import Usage
from tokenmesh.services.gateway.core.http import sse
from tokenmesh.services.gateway.core.http.errors import invalid
from tokenmesh.services.gateway.core.http.event_loop import Turns
from tokenmesh.services.gateway.core.http.fields import Bounded, Flag, Off, On, Priority, TokenId
from tokenmesh.services.gateway.core.pooling.job import PoolJob
from tokenmesh.services.gateway.core.pooling.prompts import PathOf, PoolTokenizer
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.errors import FieldPath, PayloadTooLarge, PromptTooLong, TokenMeshError
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.pooling import PoolingParams
from tokenmesh.shared.messages.tokens import TokenLogprobs
from tokenmesh.shared.tokens import unpack_ids

NAMES: Final = FieldNames({"prompt": "items", "logprob_token_ids": "label_token_ids"}, {})
"""These are the names of the fields of the completion that a request becomes."""
_GENERATED: Final = 1


class GenerativeScoringRequest(Bounded, extra="allow", strict=True, allow_inf_nan=False):
    """vLLM's body: `query` and `items` are joined as token ids."""

    model: str | None = None
    query: str | list[TokenId]
    items: list[str] | list[list[TokenId]] = Field(min_length=1)
    label_token_ids: list[TokenId] = Field(min_length=1)
    """The score is the probability of the first."""
    apply_softmax: On = True
    """Probabilities among the labels; false: among all tokens."""
    item_first: Off = False
    """Each item stands before the query."""
    add_special_tokens: On = True
    """It tells whether the query has special tokens; items never have any."""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    priority: Priority = 0
    request_id: str | None = Field(default=None, min_length=1)
    stream: Flag | None = False


class GenerativeScore(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class GenerativeScores(msgspec.Struct, kw_only=True):
    """The body of a response."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[GenerativeScore]
    usage: Usage


async def build_scoring(
    builder: RequestBuilder,
    tokenizer: PoolTokenizer,
    body: GenerativeScoringRequest,
    context: RequestContext,
) -> GenerationRequest:
    """A completion of one token for each item. Raises InvalidInput that names a chat's fields."""
    if body.stream:
        raise invalid("stream", "scores are not streamed")
    completion = CompletionRequest(
        model=body.model,
        prompt=[[0]],
        max_tokens=_GENERATED,
        temperature=0.0,
        logprobs=0,
        logprob_token_ids=list(dict.fromkeys(body.label_token_ids)),
        cache_salt=body.cache_salt,
        priority=body.priority,
        request_id=body.request_id,
    )
    limits = builder.settings
    if len(body.items) > limits.max_choices:
        bound = f"at most {limits.max_choices} (gateway.max_choices)"
        raise invalid("items", f"holds {len(body.items)} entries, {bound}")
    card = await builder.find_model(completion, context, _GENERATED)
    job = _job(builder, card, context)
    completion.prompt = await _prompts(tokenizer, body, job, limits.max_json_ids)
    request = await build_completion(builder, completion, context)
    await context.widen(len(request.jobs), 1)
    return replace(request, is_stream=False)


def _job(builder: RequestBuilder, card: ModelCard, context: RequestContext) -> PoolJob:
    """Return what tokenizers need to know; a prompt is cut below."""
    return PoolJob(
        request_id=context.request_id,
        created=0,
        card=card,
        params=PoolingParams(task="score"),
        priority=0,
        cache_salt=None,
        tenant=context.access.tenant,
        truncate_tokens=card.max_model_len,
        deadline_s=now_s() + builder.settings.tokenize_timeout_s,
    )


async def _prompts(
    tokenizer: PoolTokenizer, body: GenerativeScoringRequest, job: PoolJob, most: int
) -> list[list[int]]:
    """The ids of each prompt, cut so that there is room for a token.

    Raises PayloadTooLarge for more than `most` ids: each prompt holds all of the query's.
    """
    query = await _ids(tokenizer, job, [body.query], _of_query, special=body.add_special_tokens)
    items = await _ids(tokenizer, job, body.items, _of_item, special=False)
    room = job.card.max_model_len - _GENERATED
    if len(query[0]) >= room and not body.item_first:
        # all prompts would be the same, and so would all scores
        raise PromptTooLong.over(
            room,
            f"your query resulted in {len(query[0])} tokens, which leaves no room for an item",
            "the length of the query",
            param="query",
        )
    num_ids = sum(min(room, len(query[0]) + len(item)) for item in items)
    if num_ids > most:
        raise PayloadTooLarge(
            f"the query with each of the items holds {num_ids} token ids, at most {most} "
            "(gateway.max_json_ids)",
            param="items",
        )
    found, turns = [], Turns()
    for item in items:
        pair = (item, query[0]) if body.item_first else (query[0], item)
        found.append(list(islice(chain(*pair), room)))
        await turns.rest()
    return found


async def _ids(
    tokenizer: PoolTokenizer,
    job: PoolJob,
    prompts: Sequence[str | list[int]],
    path_of: PathOf,
    *,
    special: bool,
) -> list[list[int]]:
    texts = [each for each in prompts if isinstance(each, str)]
    if texts:
        found = await tokenizer.texts(job, texts, path_of, add_special_tokens=special)
    else:
        ids = [each for each in prompts if not isinstance(each, str)]
        found = await tokenizer.ids(job, ids, path_of)
    return [unpack_ids(each.prompt_ids) for each in found]


def _of_query(_kind: str, _index: int) -> FieldPath:
    return ("query",)


def _of_item(_kind: str, index: int) -> FieldPath:
    return ("items", index)


class ScoringWriter:
    """The `BodyWriter` of scores, which are never streamed."""

    keep_alive = sse.COMMENT

    def __init__(self, head: Head, body: GenerativeScoringRequest) -> None:
        self._head = head
        self._label = body.label_token_ids[0]
        self._applies_softmax = body.apply_softmax

    def begin(self, delivery: Delivery) -> bytes:
        return b""

    def write(self, delivery: Delivery, chunks: list[OutputChunk]) -> bytes:
        return b""

    def end(self, delivery: Delivery) -> bytes:
        return b""

    def fail(self, error: TokenMeshError) -> bytes:
        return sse.error_frames(error)

    def whole(self, delivery: Delivery, chunks: list[OutputChunk]) -> Any:
        merged = merge(chunks, len(delivery.choices))
        return GenerativeScores(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            data=[GenerativeScore(each.choice, self._score(each.logprobs[0])) for each in merged],
            usage=delivery.usage(),
        )

    def _score(self, entry: TokenLogprobs) -> float:
        logprobs = dict(zip(entry.top_ids, entry.top_logprobs, strict=True))
        own = logprobs[self._label]
        if not self._applies_softmax:
            return math.exp(own)
        best = max(logprobs.values())
        return math.exp(own - best) / sum(math.exp(each - best) for each in logprobs.values())
