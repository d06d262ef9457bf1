"""The steps of the pipeline: one request to one service each, in a span."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec

from tokenmesh.services.gateway.core.generation.delivery import Inbox
from tokenmesh.services.gateway.core.generation.request import EMPTY_PROMPT, Prompt, PromptJob
from tokenmesh.services.gateway.core.mesh.calls import ServiceCalls, card_attributes, place_of
from tokenmesh.services.gateway.core.mesh.launcher import Launcher
from tokenmesh.services.gateway.core.mesh.streams import Stream, Streams
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge, PromptTooLong
from tokenmesh.shared.ids import SEED_BITS
from tokenmesh.shared.messages import Encode, Placed, Tokenize
from tokenmesh.shared.messages.media import EMBEDS, count_by_modality
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokenize import ChatPrompt
from tokenmesh.shared.telemetry import REQUEST_ID, current_traceparent, span
from tokenmesh.shared.tokens import count_ids

_SEEDS: Final = 1 << SEED_BITS
_ENTRY_BYTES: Final = 14
"""Least size of a `TokenLogprobs` in msgpack: id, rank and lists take a byte each or more, a
log-probability always nine."""
_TOP_BYTES: Final = 10
"""Least size of each further token in it."""


class Stages:
    """The four services as the pipeline uses them."""

    def __init__(self, calls: ServiceCalls, streams: Streams, launcher: Launcher) -> None:
        self._calls = calls
        self._streams = streams
        self._launcher = launcher

    async def tokenize(self, job: PromptJob) -> Prompt:
        """Text and media to ids. Raises PromptTooLong and errors of the prompt."""
        message = Tokenize(
            request_id=job.request_id,
            model=job.card.name,
            prompt=job.prompt,
            truncate_prompt_tokens=job.truncate_prompt_tokens,
            truncation_side=job.truncation_side,
            bad_words=list(job.bad_words),
            cache_salt=job.cache_salt,
            tenant=job.tenant.name,
            max_tokens=job.card.max_model_len,
            lora=None if job.card.adapter is None else job.card.adapter.name,
            return_offsets=job.returns_offsets,
        )
        with span("tokenize", {REQUEST_ID: job.request_id}) as current:
            answer = job.tokenized or await self._calls.tokenize(message, job.deadline_s)
            if answer.too_many:
                raise _too_long(job, answer.too_many, job.card.max_model_len)
            num_tokens = count_ids(answer.token_ids)
            if not num_tokens:
                raise _no_token(job)
            current.set_attribute("tokenmesh.prompt_tokens", num_tokens)
        check_fits(job.sampling.prompt_logprobs, num_tokens, self._calls.max_message_bytes)
        return Prompt(
            packed_ids=answer.token_ids,
            num_tokens=num_tokens,
            max_tokens=_room(job, num_tokens),
            route_hashes=answer.route_hashes,
            route_head=answer.route_head,
            media=tuple(answer.media),
            media_tokens=count_by_modality(answer.media),
            bad_words_ids=tuple(tuple(ids) for ids in answer.bad_words_ids),
            warnings=tuple(answer.warnings),
            offsets=answer.offsets,
            prediction_ids=answer.prediction_ids,
        )

    async def encode(self, job: PromptJob, prompt: Prompt) -> Prompt:
        """Pixels to embeddings; a prompt without media is returned as it is."""
        items = [item for item in prompt.media if item.kind != EMBEDS]
        if not items:
            return prompt
        attributes: dict[str, str | int] = {
            REQUEST_ID: job.request_id,
            "tokenmesh.items": len(items),
        }
        with span("encode_media", attributes) as current:
            message = Encode(
                request_id=job.request_id,
                model=job.card.name,
                items=items,
                num_known=_num_known(prompt),
            )
            answer = await self._calls.encode(message, job.deadline_s)
            current.set_attribute("tokenmesh.cached", answer.cached)
        given = [item for item in prompt.media if item.kind == EMBEDS]
        return replace(prompt, media=(*answer.items, *given))

    async def place(self, job: PromptJob, prompt: Prompt) -> Placed:
        """Choose a worker. Raises Overloaded when there is no room."""
        place = place_of(job, prompt, len(job.delivered))
        return await self._calls.place_traced(place, job.deadline_s)

    @asynccontextmanager
    async def generate(
        self, job: PromptJob, prompt: Prompt, placed: Placed, inbox: Inbox
    ) -> AsyncIterator[None]:
        """Start n streams; inside the block they deliver into `inbox`."""
        attributes: dict[str, str | int] = {
            REQUEST_ID: job.request_id,
            "tokenmesh.worker": placed.worker_id,
            "tokenmesh.streams": job.n,
        }
        attributes |= card_attributes(job.card)
        with span("generate", attributes):
            async with self._running(job, [prompt] * job.n, placed, inbox):
                yield

    @asynccontextmanager
    async def step(
        self, job: PromptJob, prompts: Sequence[Prompt], inbox: Inbox
    ) -> AsyncIterator[None]:
        """Place and start one stream for each of n prompts that differ only at their end.

        Without spans: a beam search runs hundreds of such steps.
        """
        placed = await self._calls.place(place_of(job, prompts[0], 0), job.deadline_s)
        async with self._running(job, prompts, placed, inbox):
            yield

    @asynccontextmanager
    async def _running(
        self, job: PromptJob, prompts: Sequence[Prompt], placed: Placed, inbox: Inbox
    ) -> AsyncIterator[None]:
        streams: list[Stream] = []
        sampling = job.sampling_after(prompts[0].packed_ids)
        try:
            for index, prompt in enumerate(prompts):
                streams.append(self._open_stream(job, prompt, inbox, index, sampling))
            if len(streams) == 1:
                await self._launcher.launch(streams[0], placed)
            else:
                # Tokens of the first streams must be read while another one is placed again.
                for stream in streams:
                    self._launcher.launch_soon(stream, placed)
            yield
        finally:
            for stream in streams:
                self._streams.close(stream)

    def _open_stream(
        self, job: PromptJob, prompt: Prompt, inbox: Inbox, index: int, sampling: SamplingParams
    ) -> Stream:
        session = self._streams.new_session()
        session.token_ids.extend(job.delivered)
        stream = Stream(
            number=self._streams.next_number(),
            session=session,
            inbox=inbox,
            choice=job.first_choice + index,
            job=job,
            prompt=prompt,
            sampling=msgspec.structs.replace(
                sampling,
                seed=(sampling.seed + index) % _SEEDS,
                max_tokens=prompt.max_tokens,
                bad_words_ids=[*sampling.bad_words_ids, *map(list, prompt.bad_words_ids)],
                # All choices have the same prompt: its log-probabilities come with the first one.
                prompt_logprobs=sampling.prompt_logprobs if index == 0 else None,
            ),
            traceparent=current_traceparent(),
        )
        self._streams.open(stream)
        inbox.connect(stream.choice, partial(self._streams.close, stream))
        return stream


def _num_known(prompt: Prompt) -> int:
    """Parts of speech, at its beginning, that earlier prompts have had encoded."""
    count = 0
    for item in prompt.media:
        if item.follows is None or item.embeddings is None:
            break
        count += 1
    return count


def check_fits(num_logprobs: int | None, num_tokens: int, max_bytes: int) -> None:
    """Refuse log-probabilities of a prompt that cannot fit into one message of `max_bytes`.

    `num_logprobs`: for each prompt token; None: none are requested. The bound is a lower one: the
    worker refuses what exceeds the limit only when encoded. Raises PayloadTooLarge.
    """
    if num_logprobs is None:
        return
    num_bytes = (num_tokens - 1) * (_ENTRY_BYTES + num_logprobs * _TOP_BYTES)
    if num_bytes > max_bytes:
        raise PayloadTooLarge(
            f"prompt_logprobs: {num_logprobs} for each of {num_tokens} prompt tokens are at least "
            f"{num_bytes} bytes, more than the {max_bytes} of a message "
            "(bus.max_message_bytes): request fewer, or send a "
            "shorter prompt",
            param="prompt_logprobs",
        )


def _room(job: PromptJob, num_tokens: int) -> int:
    """Return how many tokens may be generated. Raises PromptTooLong."""
    limit = job.card.max_model_len
    room, wanted = limit - num_tokens, job.max_tokens
    is_too_much = wanted is not None and wanted > room and not job.cuts_max_tokens
    if room <= 0 or is_too_much:
        raise _too_long(job, num_tokens, limit)
    return room if wanted is None else min(wanted, room)


def _field(job: PromptJob) -> str:
    """The field of the client's body that holds the prompt."""
    return "messages" if isinstance(job.prompt, ChatPrompt) else "prompt"


def _no_token(job: PromptJob) -> InvalidInput:
    where = _field(job)
    message = f"the {where} holds no token"
    if where == "prompt":
        message = f"{message}. {EMPTY_PROMPT}"
    return InvalidInput(message, param=where)


def _too_long(job: PromptJob, num_tokens: int, limit: int) -> PromptTooLong:
    where = _field(job)
    if job.max_tokens is None or num_tokens >= limit:
        return PromptTooLong.over(
            limit,
            f"your {where} resulted in {num_tokens} tokens, which leaves no room for an answer",
            f"the length of the {where}",
            param=where,
        )
    return PromptTooLong.over(
        limit,
        f"you requested {num_tokens + job.max_tokens} tokens ({num_tokens} in the {where}, "
        f"{job.max_tokens} in the completion)",
        f"the {where} or max_tokens",
        param="max_tokens",
    )
