"""Derenderer: what generate answered becomes the answer of the route that was rendered."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import msgspec

from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.http import sse
from tokenmesh.services.gateway.openai.chat_stream import ChatStream
from tokenmesh.services.gateway.openai.chat_writer import ChatWriter
from tokenmesh.services.gateway.openai.completion_stream import CompletionStream
from tokenmesh.services.gateway.openai.completion_writer import CompletionWriter
from tokenmesh.services.gateway.openai.shapes import Usage
from tokenmesh.services.gateway.scale_out.derender_intake import DerenderIntake
from tokenmesh.services.gateway.scale_out.derender_request import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    TokensChunk,
    TokensResponse,
)
from tokenmesh.services.gateway.scale_out.shapes import DerenderedChat, DerenderedCompletion
from tokenmesh.services.gateway.scale_out.stream_chunk import ChunkReading
from tokenmesh.services.gateway.scale_out.whole_answer import (
    ChoicePart,
    check_parts,
    read_whole,
    with_head,
)
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput

_Body = TypeVar("_Body")
_EMPTY_CHAT: Final[dict[str, Any]] = {"delta": {}}
_EMPTY_COMPLETION: Final[dict[str, Any]] = {"text": "", "stop_reason": None}


class Derenderer:
    """Of one gateway. Bodies come back as JSON bytes."""

    def __init__(self, intake: DerenderIntake, settings: GatewaySettings) -> None:
        self._intake = intake
        self._inline_tokens = settings.inline_derender_tokens

    async def chat(self, body: DerenderChatRequest, exchange: RequestContext) -> bytes:
        """Raises InvalidInput and its kin."""
        if body.stream:
            return await self._chat_chunk(body, exchange)
        response = _there(body.generate_response, "generate_response")
        part = ChoicePart(
            response, body.prompt_token_ids or response.prompt_token_ids or [], body.prompt_tokens
        )
        ask = await self._intake.chat(body, response.choices, exchange)
        return await self._whole(ask, [part], self._chat_body, body.chat_request is not None)

    async def completion(self, body: DerenderCompletionRequest, exchange: RequestContext) -> bytes:
        """Raises InvalidInput and its kin."""
        if body.stream:
            return await self._completion_chunk(body, exchange)
        responses = _there(body.generate_responses or None, "generate_responses")
        parts = _parts(body, responses)
        choices = [choice for each in responses for choice in each.choices]
        ask = await self._intake.completion(body, choices, len(responses), exchange)
        if len(ask.jobs) != len(parts):
            raise InvalidInput(
                f"completion_request has {len(ask.jobs)} prompts, generate_responses "
                f"{len(parts)}: there must be one response a prompt",
                param="generate_responses",
            )
        is_known = body.completion_request is not None
        return await self._whole(ask, parts, self._completion_body, is_known)

    async def _whole(
        self,
        ask: GenerationRequest,
        parts: Sequence[ChoicePart],
        write: Callable[[GenerationRequest, Sequence[ChoicePart], bool], bytes],
        is_known: bool,
    ) -> bytes:
        check_parts(parts, ask.jobs[0].card)
        if {len(part.response.choices) for part in parts} != {ask.jobs[0].n}:
            raise InvalidInput(
                "every response must have the same number of choices", param="choices"
            )
        first = parts[0].response
        ask = with_head(ask, first.request_id, first.created)
        sizes = [len(each.token_ids or ()) for part in parts for each in part.response.choices]
        return await self._work(sum(sizes), lambda: write(ask, parts, is_known))

    def _chat_body(
        self, ask: GenerationRequest, parts: Sequence[ChoicePart], is_known: bool
    ) -> bytes:
        ask, delivery, pieces = read_whole(ask, parts, is_request_known=is_known)
        body = msgspec.structs.asdict(ChatWriter(ask).whole(delivery, pieces))
        _tell_created(body["usage"], parts)
        return sse.encode_json(DerenderedChat(**body, **_transfer(parts)))

    def _completion_body(
        self, ask: GenerationRequest, parts: Sequence[ChoicePart], is_known: bool
    ) -> bytes:
        ask, delivery, pieces = read_whole(ask, parts, is_request_known=is_known)
        body = msgspec.structs.asdict(CompletionWriter(ask).whole(delivery, pieces))
        _tell_created(body["usage"], parts)
        return sse.encode_json(DerenderedCompletion(**body, **_transfer(parts)))

    async def _chat_chunk(self, body: DerenderChatRequest, exchange: RequestContext) -> bytes:
        chunk = _there(body.generate_chunk, "generate_chunk")
        reading = ChunkReading(
            ask=await self._intake.chat(body, chunk.choices, exchange),
            chunk=chunk,
            state=body.stream_state,
            prompt_ids=body.prompt_token_ids or chunk.prompt_token_ids or [],
            prompt_tokens=body.prompt_tokens,
            is_request_known=body.chat_request is not None,
            make_writer=ChatWriter,
            end=_end_chat,
            empty=_EMPTY_CHAT,
        )
        return await self._chunk(reading)

    async def _completion_chunk(
        self, body: DerenderCompletionRequest, exchange: RequestContext
    ) -> bytes:
        chunk = _there(body.generate_chunk, "generate_chunk")
        prompt_ids = _one_prompt(body, chunk)
        if isinstance(body.prompt_tokens, list):
            raise InvalidInput("prompt_tokens is a number with stream", param="prompt_tokens")
        ask = await self._intake.completion(body, chunk.choices, 1, exchange)
        if body.prompt_index >= len(ask.jobs):
            raise InvalidInput(
                f"prompt_index {body.prompt_index} is not one of {len(ask.jobs)} prompts",
                param="prompt_index",
            )
        job = ask.jobs[body.prompt_index]
        reading = ChunkReading(
            ask=replace(ask, jobs=(replace(job, first_choice=0),)),
            chunk=chunk,
            state=body.stream_state,
            prompt_ids=prompt_ids,
            prompt_tokens=body.prompt_tokens,
            is_request_known=body.completion_request is not None,
            make_writer=CompletionWriter,
            end=_end_completion,
            empty=_EMPTY_COMPLETION,
            first_choice=job.first_choice,
        )
        return await self._chunk(reading)

    async def _chunk(self, reading: ChunkReading) -> bytes:
        reading.check()
        return await self._work(reading.num_tokens, lambda: sse.encode_json(reading.answer()))

    async def _work(self, num_tokens: int, work: Callable[[], bytes]) -> bytes:
        """Long answers leave the event loop to others."""
        if num_tokens <= self._inline_tokens:
            return work()
        return await asyncio.to_thread(work)


def _there(value: _Body | None, name: str) -> _Body:
    """Raises InvalidInput."""
    if value is None:
        raise InvalidInput(f"{name} is missing", param=name)
    return value


def _parts(
    body: DerenderCompletionRequest, responses: Sequence[TokensResponse]
) -> list[ChoicePart]:
    """Raises InvalidInput for lists that are not parallel."""
    counts, ids = body.prompt_tokens, body.prompt_token_ids
    for name, given in (("prompt_tokens", counts), ("prompt_token_ids", ids)):
        if given is not None and (not isinstance(given, list) or len(given) != len(responses)):
            length = len(given) if isinstance(given, list) else 1
            raise InvalidInput(
                f"{name} length ({length}) must equal generate_responses length ({len(responses)})",
                param=name,
            )
    parts = []
    for index, response in enumerate(responses):
        own = ids[index] if ids is not None else None
        if isinstance(own, int):
            raise InvalidInput(
                "prompt_token_ids must hold a list a response", param="prompt_token_ids"
            )
        count = counts[index] if isinstance(counts, list) else None
        parts.append(ChoicePart(response, own or response.prompt_token_ids or [], count))
    return parts


def _one_prompt(body: DerenderCompletionRequest, chunk: TokensChunk) -> list[int]:
    """The ids of the chunk's prompt. Raises InvalidInput."""
    given = body.prompt_token_ids or chunk.prompt_token_ids or []
    ids = [each for each in given if isinstance(each, int)]
    if len(ids) != len(given):
        raise InvalidInput(
            "prompt_token_ids is one list of ids with stream", param="prompt_token_ids"
        )
    return ids


def _tell_created(usage: Usage, parts: Sequence[ChoicePart]) -> None:
    """Only who generated knows how many tokens went into the prefix cache."""
    told = [part.response.usage.created_cache_tokens for part in parts if part.response.usage]
    known = [each for each in told if each is not None]
    if usage.prompt_tokens_details is not None:
        usage.prompt_tokens_details.created_cache_tokens = sum(known) if known else None


def _transfer(parts: Sequence[ChoicePart]) -> dict[str, Any]:
    """kv_transfer_params where all prompts have the same."""
    given = [part.response.kv_transfer_params for part in parts]
    is_one = given[0] is not None and all(each == given[0] for each in given)
    return {"kv_transfer_params": given[0]} if is_one else {}


def _end_chat(ask: GenerationRequest, usage: Usage) -> bytes:
    return ChatStream(ask.head, ask.chunks, ask.logprobs, usage.prompt_tokens).end(usage)


def _end_completion(ask: GenerationRequest, usage: Usage) -> bytes:
    return CompletionStream(ask.head, ask.chunks, ask.logprobs, [usage.prompt_tokens]).end(usage)
