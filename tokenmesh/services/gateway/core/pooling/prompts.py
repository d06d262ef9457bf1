"""PoolTokenizer: prompts of any kind become the items of Pool messages.

Many texts are cut into several messages, which any tokenizers answer. Errors name the field of the
client's body that holds the text.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from tokenmesh.services.gateway.core.http.errors import invalid
from tokenmesh.services.gateway.core.http.event_loop import Turns
from tokenmesh.services.gateway.core.http.id_lists import check_vocabulary
from tokenmesh.services.gateway.core.mesh.calls import ServiceCalls
from tokenmesh.services.gateway.core.pooling.job import PoolJob
from tokenmesh.shared import subjects
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import (
    FieldPath,
    InvalidInput,
    PayloadTooLarge,
    PromptTooLong,
    field_name,
)
from tokenmesh.shared.messages import (
    Describe,
    Described,
    TextsTokenized,
    Tokenize,
    TokenizeTexts,
)
from tokenmesh.shared.messages.pooling import PoolItem
from tokenmesh.shared.messages.tokenize import ChatPrompt
from tokenmesh.shared.telemetry import REQUEST_ID, span
from tokenmesh.shared.tokens import count_ids, pack_ids

_PART_CHARS: Final = 64 * 1024
"""Texts of one message together; a longer text has its own. UTF-8 takes up to four bytes each."""
_PART_TEXTS: Final = 1024
_PARTS_AT_A_TIME: Final = 4

PathOf = Callable[[str, int], FieldPath]
"""The client's field of a text: `texts` or `pairs`, and its number among those."""


class PoolTokenizer:
    """The tokenizers as requests for numbers use them."""

    def __init__(self, calls: ServiceCalls, settings: GatewaySettings) -> None:
        self._calls = calls
        self._settings = settings

    async def texts(
        self,
        job: PoolJob,
        texts: Sequence[str],
        path_of: PathOf,
        *,
        pairs: Sequence[str] = (),
        add_special_tokens: bool = True,
        are_second: bool = False,
    ) -> list[PoolItem]:
        """Items of texts, or of pairs: then `texts` is one text, or as many as `pairs`.

        `are_second`: the texts are the second ones of pairs that are compared here.
        Raises InvalidInput and its subclasses, and what calls of tokenizers raise.
        """
        self._check_texts(texts, pairs, path_of)
        parts = list(_parts(texts, pairs))
        limit = asyncio.Semaphore(_PARTS_AT_A_TIME)
        total = _TokenTotal(self._settings.max_pool_tokens)

        async def encode(start: int, first: list[str], second: list[str]) -> list[PoolItem]:
            message = TokenizeTexts(
                request_id=job.request_id,
                model=job.card.name,
                texts=first,
                pairs=second,
                add_special_tokens=add_special_tokens,
                truncate_prompt_tokens=job.truncate_tokens,
                truncation_side=job.truncation_side,
                context_tokens=job.max_tokens,
                tenant=job.tenant.name,
                max_text_tokens=job.max_pair_tokens if are_second else job.max_text_tokens,
                max_pair_tokens=job.max_pair_tokens,
                chat_template=job.pair_template,
                template_kwargs_json=job.pair_kwargs,
            )
            async with limit:
                answer = await self._request(message, job.deadline_s, start, path_of)
            items = _items(answer)
            total.add(items)
            return items

        with span("tokenize", {REQUEST_ID: job.request_id, "tokenmesh.texts": len(texts)}) as made:
            if len(parts) == 1:
                items = await encode(*parts[0])
            else:
                items = await _all([encode(*part) for part in parts])
            made.set_attribute("tokenmesh.prompt_tokens", total.num_tokens)
        return await self._padded(job, items)

    async def ids(
        self, job: PoolJob, prompts: Sequence[list[int]], path_of: PathOf
    ) -> list[PoolItem]:
        """Items of token ids that the client has sent. Raises InvalidInput."""
        self._check_number(len(prompts), path_of)
        items, turns = [], Turns()
        total = _TokenTotal(self._settings.max_pool_tokens)
        for index, prompt in enumerate(prompts):
            await turns.rest()
            name = field_name(path_of("texts", index))
            if not prompt:
                raise invalid(name, "is an empty list of token ids")
            limit = job.truncate_tokens
            ids = prompt
            if limit is not None and len(ids) > limit:
                ids = ids[-limit:] if job.truncation_side == "left" else ids[:limit]
            if len(ids) > job.max_tokens:
                raise PromptTooLong.over(
                    job.max_tokens,
                    f"your {name} has {len(ids)} tokens",
                    f"the length of {name}",
                    param=name,
                )
            check_vocabulary(name, ids, job.card.vocab_size)
            items.append(PoolItem(prompt_ids=pack_ids(ids)))
            total.add(items[-1:])
        return await self._padded(job, items)

    async def describe(self, job: PoolJob) -> Described:
        """The model's properties. Raises what calls of tokenizers raise."""
        timeout_s = self._settings.tokenize_timeout_s
        return await self._calls.request(
            subjects.tokenize(job.card.name),
            Describe(model=job.card.name),
            Described,
            timeout_s=timeout_s,
            deadline_s=min(job.deadline_s, now_s() + timeout_s),
        )

    async def _padded(self, job: PoolJob, items: list[PoolItem]) -> list[PoolItem]:
        """The items, each as long as a prompt may be at most, if the request wants that."""
        if not job.pads:
            return items
        length = min(job.max_tokens, job.card.max_model_len)
        if len(items) * length > self._settings.max_pool_tokens:
            raise PayloadTooLarge(
                f"padding: {len(items)} prompts of {length} tokens each are more than "
                f"{self._settings.max_pool_tokens} (gateway.max_pool_tokens): send fewer prompts",
                param="padding",
            )
        padding_id = (await self.describe(job)).padding_id
        if padding_id is None:
            raise invalid("padding", "max_length: the model has no padding token")
        found, turns, token = [], Turns(), pack_ids([padding_id])
        for item in items:
            await turns.rest()
            missing = max(0, length - count_ids(item.prompt_ids))
            types = item.type_ids and item.type_ids + bytes(missing)
            ids = item.prompt_ids + token * missing
            found.append(msgspec.structs.replace(item, prompt_ids=ids, type_ids=types))
        return found

    async def chats(
        self, job: PoolJob, prompts: Sequence[ChatPrompt], paths: Sequence[FieldPath]
    ) -> list[PoolItem]:
        """Items of conversations, as the model's template writes them. Raises InvalidInput."""
        limit = asyncio.Semaphore(_PARTS_AT_A_TIME)
        total = _TokenTotal(self._settings.max_pool_tokens)

        async def encode(prompt: ChatPrompt, path: FieldPath) -> list[PoolItem]:
            message = Tokenize(
                request_id=job.request_id,
                model=job.card.name,
                prompt=prompt,
                truncate_prompt_tokens=job.truncate_tokens,
                truncation_side=job.truncation_side,
                max_tokens=job.max_tokens,
                tenant=job.tenant.name,
            )
            async with limit:
                try:
                    answer = await self._calls.tokenize(message, job.deadline_s)
                    if answer.too_many:
                        raise _too_long(answer.too_many, job.max_tokens)
                    if not answer.token_ids:
                        raise InvalidInput("the messages hold no token", param="messages")
                    num_tokens, limit_of_media = count_ids(answer.token_ids), job.chunk_tokens
                    if answer.media and num_tokens > (limit_of_media or num_tokens):
                        raise _too_long(num_tokens, limit_of_media or 0)
                except InvalidInput as error:
                    raise located(error, path) from error
            items = [PoolItem(prompt_ids=answer.token_ids, media=answer.media)]
            total.add(items)
            return items

        with span("tokenize", {REQUEST_ID: job.request_id}) as made:
            items = await _all(
                [encode(prompt, path) for prompt, path in zip(prompts, paths, strict=True)]
            )
            made.set_attribute("tokenmesh.prompt_tokens", total.num_tokens)
        return await self._padded(job, items)

    async def _request(
        self, message: TokenizeTexts, deadline_s: float, start: int, path_of: PathOf
    ) -> TextsTokenized:
        """`start`: the number of the message's first text, or pair."""
        settings = self._settings
        num_chars = sum(map(len, message.texts)) + sum(map(len, message.pairs))
        try:
            return await self._calls.request(
                subjects.tokenize(message.model),
                message,
                TextsTokenized,
                timeout_s=settings.tokenize_timeout_s,
                deadline_s=deadline_s,
                hedge_after_s=settings.second_ask_s + num_chars / settings.second_ask_chars_per_s,
            )
        except InvalidInput as error:
            raise _renamed(error, start, path_of) from error

    def _check_number(self, number: int, path_of: PathOf, kind: str = "texts") -> None:
        limit = self._settings.max_pool_inputs
        field = str(path_of(kind, 0)[0])
        if not number:
            raise invalid(field, "is empty")
        if number > limit:
            raise invalid(
                field, f"holds {number} prompts, at most {limit} (gateway.max_pool_inputs)"
            )

    def _check_texts(self, texts: Sequence[str], pairs: Sequence[str], path_of: PathOf) -> None:
        """Refuse what is too much before a tokenizer gets it."""
        limit = self._settings.max_pool_text_chars
        self._check_number(len(texts), path_of)
        if pairs:
            self._check_number(len(pairs), path_of, "pairs")
        for kind, given in (("texts", texts), ("pairs", pairs)):
            if max(map(len, given), default=0) <= limit:
                continue
            index = next(i for i, text in enumerate(given) if len(text) > limit)
            name = field_name(path_of(kind, index))
            raise PayloadTooLarge(
                f"{name} has {len(given[index])} characters, at most {limit} "
                "(gateway.max_pool_text_chars)",
                param=name,
            )


class _TokenTotal:
    """The tokens of a request so far."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_tokens = 0

    def add(self, items: Sequence[PoolItem]) -> None:
        """Raises PayloadTooLarge above the limit."""
        self.num_tokens += sum(count_ids(item.prompt_ids) for item in items)
        if self.num_tokens > self._limit:
            raise PayloadTooLarge(
                f"the request has more than {self._limit} tokens "
                "(gateway.max_pool_tokens): send fewer prompts at a time"
            )


def _parts(
    texts: Sequence[str], pairs: Sequence[str]
) -> Iterator[tuple[int, list[str], list[str]]]:
    """The number of the first text, texts and pairs of each message."""
    rows = pairs or texts
    is_shared = bool(pairs) and len(texts) == 1
    start, num_chars = 0, 0
    for index, row in enumerate(rows):
        more = len(row) + (len(texts[index]) if pairs and not is_shared else 0)
        if index > start and (num_chars + more > _PART_CHARS or index - start >= _PART_TEXTS):
            yield _part(texts, pairs, start, index, is_shared=is_shared)
            start, num_chars = index, 0
        num_chars += more
    yield _part(texts, pairs, start, len(rows), is_shared=is_shared)


def _part(
    texts: Sequence[str], pairs: Sequence[str], start: int, end: int, *, is_shared: bool
) -> tuple[int, list[str], list[str]]:
    first = texts if is_shared else texts[start:end]
    return start, list(first), list(pairs[start:end])


def _items(answer: TextsTokenized) -> list[PoolItem]:
    types = answer.type_ids or [b""] * len(answer.token_ids)
    return [
        PoolItem(prompt_ids=ids, type_ids=types_of)
        for ids, types_of in zip(answer.token_ids, types, strict=True)
    ]


async def _all(calls: Iterable[Coroutine[object, object, list[PoolItem]]]) -> list[PoolItem]:
    """The items of several calls in their order; the first error ends them all."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return [item for items in await asyncio.gather(*tasks) for item in items]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _renamed(error: InvalidInput, start: int, path_of: PathOf) -> InvalidInput:
    """The error about a text of a message, with the client's name of the text."""
    match error.path:
        case ("texts" | "pairs" as kind, int() as index):
            name = field_name(path_of(kind, index + start))
            error = type(error)(f"{name}: {error.message}", param=name)
    return error


def located(error: InvalidInput, path: FieldPath) -> InvalidInput:
    """The error about a conversation, with the client's name of it.

    path: within `messages`, or of the field that holds its one message.
    """
    if not path or path[0] == "messages":
        return error.within(path)
    inner = error.path[2:] if error.path[:1] == ("messages",) else ()
    name = field_name((*path, *inner))
    found = error.renamed(name)
    if found.message == error.message:
        found.message = f"{name}: {error.message}"
    found.param = name
    return found


def _too_long(num_tokens: int, limit: int) -> PromptTooLong:
    return PromptTooLong.over(
        limit,
        f"your messages resulted in {num_tokens} tokens",
        "the length of the messages",
        param="messages",
    )
