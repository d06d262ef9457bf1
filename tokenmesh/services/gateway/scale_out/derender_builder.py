"""DerenderBuilder: the request that was rendered is built again, to read its answer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.mesh.catalog import Catalog
from tokenmesh.services.gateway.mesh.vocabularies import Vocabularies
from tokenmesh.services.gateway.openai.chat_builder import build_chat
from tokenmesh.services.gateway.openai.completion_builder import build_completion
from tokenmesh.services.gateway.openai.request import ChatMessage, ChatRequest, CompletionRequest
from tokenmesh.services.gateway.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.openai.sampling_fields import SamplingFields
from tokenmesh.services.gateway.scale_out.derender_request import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    DerenderRequest,
    TokensChoice,
)
from tokenmesh.services.gateway.scale_out.rendering import refuse_not_rendered
from tokenmesh.shared.errors import InvalidInput

_NOT_READ: Final = dict.fromkeys(
    (
        "request_id",
        "response_format",
        "structured_outputs",
        "thinking_token_budget",
        "kv_transfer_params",
        "ec_transfer_params",
    )
)
"""Fields without effect on how an answer is read."""


class DerenderBuilder:
    """Makes the GenerationRequest of a derender request."""

    def __init__(
        self, catalog: Catalog, builder: RequestBuilder, vocabularies: Vocabularies
    ) -> None:
        self._catalog = catalog
        self._builder = builder
        self._vocabularies = vocabularies

    async def chat(
        self, body: DerenderChatRequest, choices: Sequence[TokensChoice], context: RequestContext
    ) -> GenerationRequest:
        """`choices`: all of the body. Raises InvalidInput and other errors of the request."""
        given = body.chat_request
        if given is None:
            await self._check_is_plain(body.model)
            given = ChatRequest(
                messages=[ChatMessage(role="user", content="")],
                logprobs=_have_logprobs(choices),
                stop=_stops(choices),
                n=_least_n(choices),
            )
        elif body.stream and body.prompt_token_ids is None:
            await self._check_is_known(body.model or given.model)
        fields = _fields(body, given, choices) | {"messages": [_text_of(given.messages[-1])]}
        return _without_interval(
            await build_chat(self._builder, given.model_copy(update=fields), context)
        )

    async def completion(
        self,
        body: DerenderCompletionRequest,
        choices: Sequence[TokensChoice],
        num_prompts: int,
        context: RequestContext,
    ) -> GenerationRequest:
        """`num_prompts`: for a body without `completion_request`."""
        given = body.completion_request
        if given is None:
            given = CompletionRequest(
                prompt=[[0]] * num_prompts,
                logprobs=0 if _have_logprobs(choices) else None,
                stop=_stops(choices),
                n=_least_n(choices),
            )
        fields = _fields(body, given, choices[: len(choices) // max(1, num_prompts)])
        return _without_interval(
            await build_completion(self._builder, given.model_copy(update=fields), context)
        )

    async def _check_is_plain(self, model: str | None) -> None:
        if await self._has_parser(model):
            raise InvalidInput(
                "chat_request is required when a tool or reasoning parser is configured: without "
                "it the parser's markup would be content",
                param="chat_request",
            )

    async def _check_is_known(self, model: str | None) -> None:
        """Only the prompt shows whether an answer begins with reasoning."""
        if await self._has_parser(model):
            raise InvalidInput(
                "prompt_token_ids is required when a tool or reasoning parser is configured: the "
                "prompt decides whether the answer begins with reasoning",
                param="prompt_token_ids",
            )

    async def _has_parser(self, model: str | None) -> bool:
        card = await self._catalog.find_soon(model)
        family = (await self._vocabularies.get(card.name)).family
        return family.reasoning is not None or family.tools is not None


def _fields(
    body: DerenderRequest, given: SamplingFields, choices: Sequence[TokensChoice]
) -> dict[str, Any]:
    """Fields that replace those of the request."""
    refuse_not_rendered(given)
    fields: dict[str, Any] = {**_NOT_READ, "model": body.model or given.model}
    if body.stream:
        return fields | {"stream": True}
    return fields | {"stream": False, "stream_options": None, "n": max(1, len(choices))}


def _without_interval(request: GenerationRequest) -> GenerationRequest:
    """The chunks already have the interval that the client requested."""
    return replace(request, options=replace(request.options, stream_interval=1))


def _have_logprobs(choices: Sequence[TokensChoice]) -> bool:
    return any(each.logprobs is not None and each.logprobs.content for each in choices)


def _least_n(choices: Sequence[TokensChoice]) -> int:
    return max((each.index for each in choices), default=0) + 1


def _stops(choices: Sequence[TokensChoice]) -> str | list[str] | None:
    """The stop strings that ended the choices."""
    found = {each.stop_reason for each in choices if isinstance(each.stop_reason, str)}
    return sorted(each for each in found if each and each != "repetition_detected") or None


def _text_of(message: ChatMessage) -> ChatMessage:
    """The message without media: only its text is echoed."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [part for part in content if isinstance(part, str) or "text" in part]
    return ChatMessage(role=message["role"], content=parts)
