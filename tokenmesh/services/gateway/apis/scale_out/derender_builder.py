"""DerenderBuilder: the request that was rendered is built again, to read its answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from tokenmesh.services.gateway.apis.openai.chat_builder import build_chat
from tokenmesh.services.gateway.apis.openai.completion_builder import build_completion
from tokenmesh.services.gateway.apis.openai.request import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    template_kwargs,
)
from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.apis.openai.sampling_fields import SAMPLED, SamplingFields
from tokenmesh.services.gateway.apis.scale_out.derender_request import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    DerenderRequest,
    TokensChoice,
)
from tokenmesh.services.gateway.apis.scale_out.derender_whole import PromptResponse, check_parts
from tokenmesh.services.gateway.apis.scale_out.shapes import (
    RenderedFacts,
    RenderedRequest,
    RenderedSampling,
)
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.generation.request import GenerationRequest, Prompt, PromptJob
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid
from tokenmesh.services.gateway.core.mesh.catalog import Catalog
from tokenmesh.services.gateway.core.mesh.vocabularies import Vocabularies
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.structured import Structured
from tokenmesh.shared.tokens import unpack_ids


@dataclass(frozen=True, slots=True)
class Rendering:
    """Makes the bodies for generate from one request."""

    body: SamplingFields
    """The chat or completion; for other APIs the chat that the request was translated to."""
    generation: GenerationRequest
    transfer: dict[str, Any] | None
    """kv_transfer_params, passed through."""
    request_id: str
    """The id of the request; of several prompts, each has this id and its number."""
    returns_offsets: bool = False
    """It tells whether places of tokens are wanted."""

    def request(self, job: PromptJob, prompt: Prompt) -> RenderedRequest:
        """The body for one prompt. Raises NotSupported for a prompt with media."""
        if prompt.media:
            raise NotSupported("media are not supported by the render endpoint", param="messages")
        body, sampling = self.body, job.sampling_after(prompt.packed_ids)
        structured, options = sampling.structured, body.stream_options
        return RenderedRequest(
            request_id=self.request_id + job.request_id.removeprefix(self.generation.head.id),
            token_ids=unpack_ids(prompt.packed_ids),
            sampling_params=self._sampling(sampling, job, prompt),
            model=body.model or job.card.name,
            stream=bool(body.stream),
            stream_options=None if options is None else options.model_dump(),
            cache_salt=body.cache_salt,
            priority=body.priority,
            reasoning_ended=None if structured is None else self._has_ended(structured),
            reasoning_parser_kwargs=self._parser_kwargs(),
            kv_transfer_params=self.transfer,
            rendered=_facts(sampling, prompt),
            token_offsets=None if prompt.offsets is None else pairs_of(prompt.offsets),
        )

    def _sampling(
        self, sampling: SamplingParams, job: PromptJob, prompt: Prompt
    ) -> RenderedSampling:
        body, options = self.body, self.generation.options
        detection = body.repetition_detection
        values = {
            name: getattr(sampling, field.wire_name or name) for name, field in SAMPLED.items()
        }
        bias = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
        values |= {
            "logit_bias": bias or None,
            "logprob_token_ids": sampling.logprob_token_ids or None,
            "repetition_detection": None if detection is None else detection.model_dump(),
        }
        return RenderedSampling(
            n=job.n,
            **values,
            # Without a seed from the client generate draws one, a different one for each response.
            seed=body.seed,
            stop=body.stops,
            include_stop_str_in_output=options.include_stop,
            max_tokens=prompt.max_tokens,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            bad_words=list(job.bad_words) or None,
            skip_special_tokens=options.skip_special_tokens,
            spaces_between_special_tokens=options.spaces_between_special_tokens,
            stream_interval=body.stream_interval,
            structured_outputs=None
            if sampling.structured is None
            else _outputs(sampling.structured),
            thinking_token_budget=body.thinking_token_budget,
        )

    def _has_ended(self, structured: Structured) -> bool:
        """Return what vLLM says; here `rendered` decides, since hidden reasoning is not content."""
        is_hidden = isinstance(self.body, ChatRequest) and not self.body.include_reasoning
        return is_hidden or not structured.after

    def _parser_kwargs(self) -> dict[str, Any] | None:
        if self.generation.text.family.reasoning is None or not isinstance(self.body, ChatRequest):
            return None
        return {"chat_template_kwargs": template_kwargs(self.body) or {}}


def pairs_of(offsets: bytes) -> list[tuple[int, int]]:
    """`Tokenized.offsets` as JSON has them."""
    numbers = iter(unpack_ids(offsets))
    return list(zip(numbers, numbers, strict=True))


def refuse_not_rendered(body: SamplingFields) -> None:
    """Raise NotSupported for what token ids and sampling parameters cannot express."""
    if body.use_beam_search:
        raise NotSupported(
            "Beam search is not supported by the render endpoint", param="use_beam_search"
        )
    if getattr(body, "prompt_embeds", None):
        raise invalid("prompt_embeds", "is not supported by the render endpoint", NotSupported)


def _facts(sampling: SamplingParams, prompt: Prompt) -> RenderedFacts:
    structured, thinking = sampling.structured, sampling.thinking
    return RenderedFacts(
        bad_words_token_ids=[list(ids) for ids in prompt.bad_words_ids] or None,
        reasoning_end_token_ids=None if structured is None else structured.after,
        thinking=None if thinking is None else msgspec.structs.asdict(thinking),
        calls=None if structured is None else structured.calls,
    )


def _outputs(structured: Structured) -> dict[str, Any]:
    """The constraint as the field structured_outputs."""
    value: Any = structured.text
    if structured.kind == "json_object":
        value = True
    elif structured.kind == "choice":
        value = msgspec.json.decode(structured.text)
    outputs: dict[str, Any] = {structured.kind: value}
    if not structured.any_whitespace:
        outputs["disable_any_whitespace"] = True
    if structured.whitespace_pattern is not None:
        outputs["whitespace_pattern"] = structured.whitespace_pattern
    if not structured.additional_properties:
        outputs["disable_additional_properties"] = True
    return outputs


_NOT_READ: Final = dict.fromkeys(
    (
        "request_id",
        "response_format",
        "structured_outputs",
        "thinking_token_budget",
        "kv_transfer_params",
        "ec_transfer_params",
        "return_token_offsets",
    )
)
"""Fields without effect on how an answer is read."""


@dataclass(slots=True)
class DerenderBuilder:
    """Makes the GenerationRequest of a derender request."""

    catalog: Catalog
    builder: RequestBuilder
    vocabularies: Vocabularies

    async def check(self, parts: Sequence[PromptResponse], model: str | None) -> None:
        """Raises InvalidInput for what is too large, or not of the model."""
        check_parts(parts, await self.catalog.find_soon(model))

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
        request = await build_chat(self.builder, given.model_copy(update=fields), context)
        if body.chat_request is None:
            # Without the request it is unknown what the parser that was found would have to read.
            request = replace(request, jobs=tuple(replace(j, parsing=None) for j in request.jobs))
        return _without_interval(request)

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
            await build_completion(self.builder, given.model_copy(update=fields), context)
        )

    async def _check_is_plain(self, model: str | None) -> None:
        if await self._has_parser(model):
            raise invalid(
                "chat_request",
                "is required when a tool or reasoning parser is configured: without "
                "it the parser's markup would be content",
            )

    async def _check_is_known(self, model: str | None) -> None:
        """Only the prompt shows whether an answer begins with reasoning."""
        if await self._has_parser(model):
            raise invalid(
                "prompt_token_ids",
                "is required when a tool or reasoning parser is configured: the "
                "prompt decides whether the answer begins with reasoning",
            )

    async def _has_parser(self, model: str | None) -> bool:
        """Return whether the operator has chosen one; one that is found in the template counts as
        none.
        """
        card = await self.catalog.find_soon(model)
        text = await self.vocabularies.get(card.name)
        has_any = text.family.reasoning is not None or text.family.tools is not None
        return has_any and not text.described.detects_parsers


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
