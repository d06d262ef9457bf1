"""The steps of the pipeline: one question to one service each, in a span of its own."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec

from tokenmesh.services.gateway.generation.inbox import Inbox
from tokenmesh.services.gateway.generation.prompt_job import EMPTY_PROMPT, Prompt, PromptJob
from tokenmesh.services.gateway.generation.prompt_logprobs import check_fits
from tokenmesh.services.gateway.mesh.calls import ServiceCalls
from tokenmesh.services.gateway.mesh.launcher import Launcher
from tokenmesh.services.gateway.mesh.placement_trace import trace_placement
from tokenmesh.services.gateway.mesh.streams import Stream, Streams
from tokenmesh.shared import subjects
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput, PromptTooLong
from tokenmesh.shared.ids import SEED_BITS, GatewayId
from tokenmesh.shared.messages import Encode, Encoded, Generate, Place, Placed, Tokenize
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokenize import ChatPrompt
from tokenmesh.shared.telemetry import REQUEST_ID, current_traceparent, span
from tokenmesh.shared.tokens import count_ids

_SEEDS: Final = 1 << SEED_BITS


class Stages:
    """The four services as the pipeline sees them."""

    def __init__(
        self,
        gateway: GatewayId,
        calls: ServiceCalls,
        streams: Streams,
        launcher: Launcher,
        settings: GatewaySettings,
    ) -> None:
        self._gateway = gateway
        self._calls = calls
        self._streams = streams
        self._launcher = launcher
        self._settings = settings

    async def tokenize(self, job: PromptJob) -> Prompt:
        """Text and media to ids. Raises PromptTooLong and whatever the tokenizer finds wrong."""
        question = Tokenize(
            request_id=job.request_id,
            model=job.card.name,
            prompt=job.prompt,
            truncate_prompt_tokens=job.truncate_prompt_tokens,
            truncation_side=job.truncation_side,
            bad_words=list(job.bad_words),
            cache_salt=job.cache_salt,
            tenant=job.tenant.name,
            max_tokens=job.card.max_model_len,
        )
        with span("tokenize", {REQUEST_ID: job.request_id}) as current:
            answer = job.tokenized or await self._calls.tokenize(question, job.deadline_s)
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
            bad_words_ids=tuple(tuple(ids) for ids in answer.bad_words_ids),
        )

    async def encode(self, job: PromptJob, prompt: Prompt) -> Prompt:
        """Pixels to embeddings; nothing to do without media."""
        if not prompt.media:
            return prompt
        question = Encode(request_id=job.request_id, model=job.card.name, items=list(prompt.media))
        attributes: dict[str, str | int] = {
            REQUEST_ID: job.request_id,
            "tokenmesh.items": len(prompt.media),
        }
        with span("encode_media", attributes) as current:
            answer = await self._calls.ask(
                subjects.encode(job.card.name),
                question,
                Encoded,
                timeout_s=self._settings.encode_timeout_s,
                deadline_s=job.deadline_s,
                patience_s=self._settings.second_encode_s,
            )
            current.set_attribute("tokenmesh.cached", answer.cached)
        return replace(prompt, media=tuple(answer.items))

    async def place(self, job: PromptJob, prompt: Prompt) -> Placed:
        """Choose a worker. Raises Overloaded when there is no room."""
        with span("place", {REQUEST_ID: job.request_id}) as current:
            question = _place_of(job, prompt)
            if job.delivered:
                num_tokens = question.num_tokens + len(job.delivered)
                question = msgspec.structs.replace(question, num_tokens=num_tokens)
            placed = await self._calls.place(question, job.deadline_s)
            trace_placement(current, placed)
        return placed

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
        with span("generate", attributes):
            async with self._running(job, [prompt] * job.n, placed, inbox):
                yield

    @asynccontextmanager
    async def step(
        self, job: PromptJob, prompts: Sequence[Prompt], inbox: Inbox
    ) -> AsyncIterator[None]:
        """Place and start a stream for each of n prompts that differ at their end only.

        Without spans of its own: a beam search takes hundreds of these.
        """
        placed = await self._calls.place(_place_of(job, prompts[0]), job.deadline_s)
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
                streams.append(self._new_stream(job, prompt, inbox, index, sampling))
            if len(streams) == 1:
                await self._launcher.launch(streams[0], placed)
            else:
                # What the first ones bring must be read while another one is tried elsewhere.
                for stream in streams:
                    self._launcher.launch_soon(stream, placed)
            yield
        finally:
            for stream in streams:
                self._streams.close(stream)

    def _new_stream(
        self, job: PromptJob, prompt: Prompt, inbox: Inbox, index: int, sampling: SamplingParams
    ) -> Stream:
        sampling = msgspec.structs.replace(
            sampling,
            seed=(sampling.seed + index) % _SEEDS,
            max_tokens=prompt.max_tokens,
            bad_words_ids=[*sampling.bad_words_ids, *map(list, prompt.bad_words_ids)],
            # The prompt is the same for all choices: one of them tells about it.
            prompt_logprobs=sampling.prompt_logprobs if index == 0 else None,
        )
        session = self._streams.new_session()
        session.token_ids.extend(job.delivered)
        stream = Stream(
            session=session,
            inbox=inbox,
            choice=job.first_choice + index,
            place=_place_of(job, prompt),
            generate=Generate(
                request_id=job.request_id,
                model=job.card.name,
                gateway=self._gateway,
                stream=self._streams.next_number(),
                epoch=0,
                prompt_ids=prompt.packed_ids,
                sampling=sampling,
                media=list(prompt.media),
                priority=job.priority,
                tenant=job.tenant.name,
                weight=job.tenant.weight,
                tenant_priority=job.tenant.priority,
                cache_salt=job.cache_salt,
                route_head=prompt.route_head,
            ),
            deadline_s=job.deadline_s,
            traceparent=current_traceparent(),
        )
        self._streams.open(stream)
        inbox.connect(stream.choice, partial(self._streams.close, stream))
        return stream


def _place_of(job: PromptJob, prompt: Prompt) -> Place:
    return Place(
        request_id=job.request_id,
        model=job.card.name,
        num_tokens=prompt.num_tokens,
        max_tokens=prompt.max_tokens,
        num_streams=job.n,
        route_hashes=prompt.route_hashes,
        priority=job.priority,
        tenant=job.tenant.name,
        weight=job.tenant.weight,
        tenant_priority=job.tenant.priority,
        has_grammar=job.sampling.structured is not None,
    )


def _room(job: PromptJob, num_tokens: int) -> int:
    """How many tokens may be generated. Raises PromptTooLong."""
    limit = job.card.max_model_len
    room, wanted = limit - num_tokens, job.max_tokens
    is_too_much = wanted is not None and wanted > room and not job.cuts_max_tokens
    if room <= 0 or is_too_much:
        raise _too_long(job, num_tokens, limit)
    return room if wanted is None else min(wanted, room)


def _field(job: PromptJob) -> str:
    """Where the client wrote the prompt."""
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
