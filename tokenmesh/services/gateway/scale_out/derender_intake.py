"""DerenderIntake: the request that was rendered becomes the same Ask again, to read its answer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.mesh.catalog import Catalog
from tokenmesh.services.gateway.mesh.vocabularies import Vocabularies
from tokenmesh.services.gateway.openai.chat_request import ChatMessage, ChatRequest
from tokenmesh.services.gateway.openai.completion_request import CompletionRequest
from tokenmesh.services.gateway.openai.intake import Intake
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
"""Fields that generate has obeyed: how an answer is read does not depend on them."""


class DerenderIntake:
    """Of one gateway."""

    def __init__(self, catalog: Catalog, intake: Intake, vocabularies: Vocabularies) -> None:
        self._catalog = catalog
        self._intake = intake
        self._vocabularies = vocabularies

    async def chat(
        self, body: DerenderChatRequest, choices: Sequence[TokensChoice], exchange: RequestContext
    ) -> GenerationRequest:
        """`choices`: all that the body has. Raises InvalidInput and its kin."""
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
        return _plain(await self._intake.chat(given.model_copy(update=fields), exchange))

    async def completion(
        self,
        body: DerenderCompletionRequest,
        choices: Sequence[TokensChoice],
        num_prompts: int,
        exchange: RequestContext,
    ) -> GenerationRequest:
        """`num_prompts` counts where the body does not bring the request."""
        given = body.completion_request
        if given is None:
            given = CompletionRequest(
                prompt=[[0]] * num_prompts,
                logprobs=0 if _have_logprobs(choices) else None,
                stop=_stops(choices),
                n=_least_n(choices),
            )
        fields = _fields(body, given, choices[: len(choices) // max(1, num_prompts)])
        return _plain(await self._intake.completion(given.model_copy(update=fields), exchange))

    async def _check_is_plain(self, model: str | None) -> None:
        family = (await self._vocabularies.get((await self._catalog.find_soon(model)).name)).family
        if family.reasoning is not None or family.tools is not None:
            raise InvalidInput(
                "chat_request is required when a tool or reasoning parser is configured: without "
                "it the parser's markup would be content",
                param="chat_request",
            )

    async def _check_is_known(self, model: str | None) -> None:
        """Raise InvalidInput where only the prompt says whether an answer begins with reasoning."""
        family = (await self._vocabularies.get((await self._catalog.find_soon(model)).name)).family
        if family.reasoning is not None or family.tools is not None:
            raise InvalidInput(
                "prompt_token_ids is required when a tool or reasoning parser is configured: the "
                "prompt decides whether the answer begins with reasoning",
                param="prompt_token_ids",
            )


def _fields(
    body: DerenderRequest, given: SamplingFields, choices: Sequence[TokensChoice]
) -> dict[str, Any]:
    """What counts here instead of what the request says."""
    refuse_not_rendered(given)
    fields: dict[str, Any] = {**_NOT_READ, "model": body.model or given.model}
    if body.stream:
        return fields | {"stream": True}
    return fields | {"stream": False, "stream_options": None, "n": max(1, len(choices))}


def _plain(ask: GenerationRequest) -> GenerationRequest:
    """Chunks have come at the intervals that the client wanted."""
    return replace(ask, options=replace(ask.options, stream_interval=1))


def _have_logprobs(choices: Sequence[TokensChoice]) -> bool:
    return any(each.logprobs is not None and each.logprobs.content for each in choices)


def _least_n(choices: Sequence[TokensChoice]) -> int:
    return max((each.index for each in choices), default=0) + 1


def _stops(choices: Sequence[TokensChoice]) -> str | list[str] | None:
    """The stop strings that ended them."""
    found = {each.stop_reason for each in choices if isinstance(each.stop_reason, str)}
    return sorted(each for each in found if each and each != "repetition_detected") or None


def _text_of(message: ChatMessage) -> ChatMessage:
    """Without media: an echo is of text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [part for part in content if isinstance(part, str) or "text" in part]
    return ChatMessage(role=message["role"], content=parts)
