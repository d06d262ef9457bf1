"""Admission of a Pool: each item becomes a Request of the engine, or an error that says why not."""

import asyncio
from collections.abc import Sequence
from typing import Final

from tokenmesh.engine.models.pooling.facts import PoolingFacts
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import RequestSpec, StreamKey
from tokenmesh.services.worker_svc.admission import (
    check_counters,
    check_ids,
    check_media,
    read_ids,
    tenant_of,
)
from tokenmesh.services.worker_svc.loaded import Loaded
from tokenmesh.shared.clock import now_ns
from tokenmesh.shared.errors import InvalidInput, PromptTooLong
from tokenmesh.shared.hashing import Adapter
from tokenmesh.shared.messages.media import EMBEDS
from tokenmesh.shared.messages.pooling import Pool, PoolingParams, PoolItem
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.tokens import BYTES_PER_ID

_DRAWS_NOTHING: Final = SamplingParams(seed=0, max_tokens=1)
_TOKENS_AT_ONCE: Final = 4096
"""Tokens of the items that are read between two turns of the event loop; about a millisecond."""
_ITEM_TOKENS: Final = 16
"""It holds what an item counts for at least, whatever its length: it takes memory too."""


def num_tokens_of(message: Pool) -> int:
    """Prompt tokens of all items, as the worker's queue counts them."""
    return sum(max(_ITEM_TOKENS, len(each.prompt_ids) // BYTES_PER_ID) for each in message.items)


async def admit_pool(
    message: Pool,
    loaded: Loaded,
    block_size: int,
    traceparent: str | None = None,
    lora: Adapter | None = None,
) -> list[Request]:
    """The engine's requests, in the order of the items, still without the matrices of `lora`.

    Raises InvalidInput.
    """
    facts = loaded.pooling
    if facts is None:
        raise InvalidInput("this model generates text; it does not pool", param="model")
    if not message.items:
        raise InvalidInput("there is nothing to pool", param="items")
    check_counters(message)
    facts.check(message.params)
    room = loaded.max_model_len
    if facts.is_causal:
        room = min(room, (loaded.runner.num_blocks - 1) * block_size)
    requests: list[Request] = []
    num_read = 0
    for number, item in enumerate(message.items):
        prompt_ids = _checked(item, number, room, loaded, facts, message.params)
        # one trace of a Pool shows how it went for the others
        parent = traceparent if not number else None
        requests.append(_request(message, number, prompt_ids, loaded, facts, parent, lora))
        num_read += _ITEM_TOKENS + len(prompt_ids)
        if num_read > _TOKENS_AT_ONCE:
            num_read = 0
            await asyncio.sleep(0)
    return requests


def _checked(
    item: PoolItem,
    number: int,
    room: int,
    loaded: Loaded,
    facts: PoolingFacts,
    params: PoolingParams,
) -> list[int]:
    """The prompt of an item."""
    where = f"item {number}"
    num_tokens = len(item.prompt_ids) // BYTES_PER_ID
    if num_tokens > room:
        raise PromptTooLong(
            f"{where} has {num_tokens} tokens; the model takes {room}", param="items"
        )
    prompt_ids = read_ids(item.prompt_ids, "prompt_ids")
    if not prompt_ids:
        raise InvalidInput(f"{where} holds no token", param="items")
    media = sorted(item.media, key=lambda each: each.offset)
    check_media(media, len(prompt_ids), loaded)
    if not facts.is_causal and any(each.kind == EMBEDS for each in media):
        raise InvalidInput(
            "prompt_embeds: this model takes tokens only, decoders take embeddings", param="items"
        )
    check_ids(prompt_ids, media, where, loaded.vocab_size)
    _check_types(item.type_ids, where, len(prompt_ids), facts.num_types)
    try:
        facts.num_left_out(params, prompt_ids)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error.message}", param="items") from error
    return facts.read_of(params, prompt_ids)


def _check_types(type_ids: bytes, where: str, num_tokens: int, num_types: int) -> None:
    if not type_ids:
        return
    if len(type_ids) != num_tokens:
        raise InvalidInput(
            f"{where} has {len(type_ids)} type_ids for {num_tokens} tokens", param="items"
        )
    if (largest := max(type_ids)) >= num_types:
        raise InvalidInput(
            f"{where} has the type {largest}; the model has {num_types}", param="items"
        )


def _request(
    message: Pool,
    number: int,
    prompt_ids: list[int],
    loaded: Loaded,
    facts: PoolingFacts,
    traceparent: str | None,
    lora: Adapter | None,
) -> Request:
    media = sorted(message.items[number].media, key=lambda each: each.offset)
    spec = RequestSpec(
        key=StreamKey(message.gateway, message.stream, message.attempt, number),
        request_id=message.request_id,
        num_prompt=len(prompt_ids),
        sampling=_DRAWS_NOTHING,
        media=media,
        whole_runs=loaded.media.whole_runs(media),
        owner=tenant_of(message),
        priority=message.priority,
        cache_salt=loaded.cache_salt(message.cache_salt, len(prompt_ids)),
        rope_boundary=loaded.rope_boundary,
        traceparent=traceparent,
        lora=lora,
        pooling=facts.completed(message.params),
        type_ids=message.items[number].type_ids,
        is_whole=not facts.is_causal,
        reads_all=facts.reads_all_for(message.params),
    )
    request = Request(spec, prompt_ids)
    request.timeline.arrived_ns = now_ns()
    return request


def num_cached(requests: Sequence[Request]) -> int:
    """Prompt tokens that were found in the prefix cache."""
    return sum(each.place.num_cached or 0 for each in requests)
