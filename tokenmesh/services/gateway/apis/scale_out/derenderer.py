"""Derenderer: generate's response becomes the response of the route that was rendered."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import msgspec

from tokenmesh.services.gateway.apis.openai.chat_writer import ChatWriter
from tokenmesh.services.gateway.apis.openai.completion_writer import CompletionWriter
from tokenmesh.services.gateway.apis.openai.response_parts import CHAT_CHUNK, COMPLETION_CHUNK
from tokenmesh.services.gateway.apis.openai.sampling_fields import SamplingFields
from tokenmesh.services.gateway.apis.scale_out.derender_builder import DerenderBuilder
from tokenmesh.services.gateway.apis.scale_out.derender_chunk import ChunkDerendering
from tokenmesh.services.gateway.apis.scale_out.derender_request import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    TokensChunk,
    TokensResponse,
)
from tokenmesh.services.gateway.apis.scale_out.derender_whole import (
    PromptResponse,
    read_whole,
    with_head,
)
from tokenmesh.services.gateway.apis.scale_out.shapes import DerenderedChat, DerenderedCompletion
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.generation.request import GenerationRequest
from tokenmesh.services.gateway.core.generation.usage import Usage
from tokenmesh.services.gateway.core.http import sse
from tokenmesh.services.gateway.core.http.errors import invalid
from tokenmesh.shared.config.requests import ScaleOutSettings
from tokenmesh.shared.errors import InvalidInput

_Body = TypeVar("_Body")
_EMPTY_CHAT: Final[dict[str, Any]] = {"delta": {}}
_EMPTY_COMPLETION: Final[dict[str, Any]] = {"text": "", "stop_reason": None}


class Derenderer:
    """Returns bodies as JSON bytes."""

    def __init__(self, builder: DerenderBuilder, settings: ScaleOutSettings) -> None:
        self._builder = builder
        self._inline_tokens = settings.inline_derender_tokens

    async def chat(self, body: DerenderChatRequest, context: RequestContext) -> bytes:
        """Raises InvalidInput and other errors of the request."""
        if body.stream:
            return await self._chat_chunk(body, context)
        response = _required(body.generate_response, "generate_response")
        part = PromptResponse(
            response, body.prompt_token_ids or response.prompt_token_ids or [], body.prompt_tokens
        )
        # What is too large is named before what is missing, as in vLLM.
        await self._builder.check([part], body.model or _model_of(body.chat_request))
        request = await self._builder.chat(body, response.choices, context)
        return await self._whole(request, [part], _chat_body, body.chat_request is not None)

    async def completion(self, body: DerenderCompletionRequest, context: RequestContext) -> bytes:
        """Raises InvalidInput and other errors of the request."""
        if body.stream:
            return await self._completion_chunk(body, context)
        responses = _required(body.generate_responses or None, "generate_responses")
        parts = _parts(body, responses)
        choices = [choice for each in responses for choice in each.choices]
        asked = body.completion_request
        await self._builder.check(parts, body.model or _model_of(asked))
        request = await self._builder.completion(body, choices, len(responses), context)
        if len(request.jobs) != len(parts):
            raise InvalidInput(
                f"completion_request has {len(request.jobs)} prompts, generate_responses "
                f"{len(parts)}: there must be one response for each prompt",
                param="generate_responses",
            )
        is_known = body.completion_request is not None
        return await self._whole(request, parts, _completion_body, is_known)

    async def _whole(
        self,
        request: GenerationRequest,
        parts: Sequence[PromptResponse],
        write: Callable[[GenerationRequest, Sequence[PromptResponse], bool], bytes],
        is_known: bool,
    ) -> bytes:
        if {len(part.response.choices) for part in parts} != {request.jobs[0].n}:
            raise InvalidInput(
                "every response must have the same number of choices", param="choices"
            )
        first = parts[0].response
        request = with_head(request, first.request_id, first.created)
        sizes = [len(each.token_ids or ()) for part in parts for each in part.response.choices]
        return await self._work(sum(sizes), lambda: write(request, parts, is_known))

    async def _chat_chunk(self, body: DerenderChatRequest, context: RequestContext) -> bytes:
        chunk = _required(body.generate_chunk, "generate_chunk")
        reading = ChunkDerendering(
            request=await self._builder.chat(body, chunk.choices, context),
            chunk=chunk,
            state=body.stream_state,
            prompt_ids=body.prompt_token_ids or chunk.prompt_token_ids or [],
            prompt_tokens=body.prompt_tokens,
            is_request_known=body.chat_request is not None,
            make_writer=ChatWriter,
            kind=CHAT_CHUNK,
            empty=_EMPTY_CHAT,
        )
        return await self._chunk(reading)

    async def _completion_chunk(
        self, body: DerenderCompletionRequest, context: RequestContext
    ) -> bytes:
        chunk = _required(body.generate_chunk, "generate_chunk")
        prompt_ids = _one_prompt(body, chunk)
        if isinstance(body.prompt_tokens, list):
            raise invalid("prompt_tokens", "must be a number when stream is true")
        request = await self._builder.completion(body, chunk.choices, 1, context)
        if body.prompt_index >= len(request.jobs):
            raise invalid(
                "prompt_index", f"{body.prompt_index} is not one of {len(request.jobs)} prompts"
            )
        job = request.jobs[body.prompt_index]
        reading = ChunkDerendering(
            request=replace(request, jobs=(replace(job, first_choice=0),)),
            chunk=chunk,
            state=body.stream_state,
            prompt_ids=prompt_ids,
            prompt_tokens=body.prompt_tokens,
            is_request_known=body.completion_request is not None,
            make_writer=CompletionWriter,
            kind=COMPLETION_CHUNK,
            empty=_EMPTY_COMPLETION,
            first_choice=job.first_choice,
        )
        return await self._chunk(reading)

    async def _chunk(self, reading: ChunkDerendering) -> bytes:
        reading.check()
        return await self._work(reading.num_tokens, lambda: sse.encode_json(reading.answer()))

    async def _work(self, num_tokens: int, work: Callable[[], bytes]) -> bytes:
        """Long answers are written in a thread."""
        if num_tokens <= self._inline_tokens:
            return work()
        return await asyncio.to_thread(work)


def _model_of(request: SamplingFields | None) -> str | None:
    return None if request is None else request.model


def _chat_body(
    request: GenerationRequest, parts: Sequence[PromptResponse], is_known: bool
) -> bytes:
    request, delivery, chunks = read_whole(
        request, parts, is_request_known=is_known, needs_each=False
    )
    body = msgspec.structs.asdict(ChatWriter(request).whole(delivery, chunks))
    _set_created(body["usage"], parts)
    return sse.encode_json(DerenderedChat(**body, **_transfer(parts)))


def _completion_body(
    request: GenerationRequest, parts: Sequence[PromptResponse], is_known: bool
) -> bytes:
    request, delivery, chunks = read_whole(request, parts, is_request_known=is_known)
    body = msgspec.structs.asdict(CompletionWriter(request).whole(delivery, chunks))
    _set_created(body["usage"], parts)
    return sse.encode_json(DerenderedCompletion(**body, **_transfer(parts)))


def _required(value: _Body | None, name: str) -> _Body:
    if value is None:
        raise invalid(name, "is missing")
    return value


def _parts(
    body: DerenderCompletionRequest, responses: Sequence[TokensResponse]
) -> list[PromptResponse]:
    """Raises InvalidInput for lists that are not parallel."""
    counts, ids = body.prompt_tokens, body.prompt_token_ids
    for name, given in (("prompt_tokens", counts), ("prompt_token_ids", ids)):
        if given is not None and (not isinstance(given, list) or len(given) != len(responses)):
            length = len(given) if isinstance(given, list) else 1
            raise invalid(
                name, f"length ({length}) must equal generate_responses length ({len(responses)})"
            )
    parts = []
    for index, response in enumerate(responses):
        own = ids[index] if ids is not None else None
        if isinstance(own, int):
            raise invalid("prompt_token_ids", "must hold one list for each response")
        count = counts[index] if isinstance(counts, list) else None
        parts.append(PromptResponse(response, own or response.prompt_token_ids or [], count))
    return parts


def _one_prompt(body: DerenderCompletionRequest, chunk: TokensChunk) -> list[int]:
    """The ids of the chunk's prompt. Raises InvalidInput."""
    given = body.prompt_token_ids or chunk.prompt_token_ids or []
    ids = [each for each in given if isinstance(each, int)]
    if len(ids) != len(given):
        raise invalid("prompt_token_ids", "must be one list of ids when stream is true")
    return ids


def _set_created(usage: Usage, parts: Sequence[PromptResponse]) -> None:
    """Only the generate server knows how many tokens were added to the prefix cache."""
    reported = [part.response.usage.created_cache_tokens for part in parts if part.response.usage]
    known = [each for each in reported if each is not None]
    if usage.prompt_tokens_details is not None:
        usage.prompt_tokens_details.created_cache_tokens = sum(known) if known else None


def _transfer(parts: Sequence[PromptResponse]) -> dict[str, Any]:
    """kv_transfer_params, if all prompts have the same, and the metrics of the only prompt."""
    given = [part.response.kv_transfer_params for part in parts]
    is_one = given[0] is not None and all(each == given[0] for each in given)
    fields = {"kv_transfer_params": given[0]} if is_one else {}
    metrics = parts[0].response.metrics
    if len(parts) == 1 and metrics is not None:
        fields["metrics"] = metrics
    return fields
