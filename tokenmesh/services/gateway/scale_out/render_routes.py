"""POST .../render: what a base route would generate from, as bodies for /inference/v1/generate."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.anthropic.request import MessagesRequest
from tokenmesh.services.gateway.anthropic.routes import drop_useless_budget, translate_body
from tokenmesh.services.gateway.context import RequestContext, context_of
from tokenmesh.services.gateway.errors import json_response
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.generation.request import GenerationRequest, Prompt, PromptJob
from tokenmesh.services.gateway.http.body import read_json
from tokenmesh.services.gateway.http.middleware import Endpoint
from tokenmesh.services.gateway.openai.chat_builder import build_chat
from tokenmesh.services.gateway.openai.completion_builder import build_completion
from tokenmesh.services.gateway.openai.errors import NotSupported
from tokenmesh.services.gateway.openai.request import (
    ChatRequest,
    CompletionRequest,
    template_kwargs,
)
from tokenmesh.services.gateway.openai.sampling_fields import SAMPLED, SamplingFields
from tokenmesh.services.gateway.responses.request import ResponsesRequest
from tokenmesh.services.gateway.responses.response_plan import prepare
from tokenmesh.services.gateway.scale_out.shapes import (
    RenderedFacts,
    RenderedRequest,
    RenderedSampling,
)
from tokenmesh.shared.ids import new_response_id
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.structured import Structured
from tokenmesh.shared.telemetry import span
from tokenmesh.shared.tokens import unpack_ids

CHAT: Final = "/v1/chat/completions/render"
COMPLETION: Final = "/v1/completions/render"
MESSAGES: Final = "/v1/messages/render"
RESPONSES: Final = "/v1/responses/render"


@dataclass(frozen=True, slots=True)
class Rendering:
    """Makes the bodies for generate from one request."""

    body: SamplingFields
    """The chat or completion; for other APIs the chat that the request was translated to."""
    generation: GenerationRequest
    transfer: dict[str, Any] | None
    """kv_transfer_params, passed through."""

    def request(self, job: PromptJob, prompt: Prompt) -> RenderedRequest:
        """The body for one prompt. Raises NotSupported for a prompt with media."""
        if prompt.media:
            raise NotSupported("media are not supported by the render endpoint", param="messages")
        body, sampling = self.body, job.sampling_after(prompt.packed_ids)
        structured, options = sampling.structured, body.stream_options
        return RenderedRequest(
            request_id=job.request_id,
            token_ids=unpack_ids(prompt.packed_ids),
            sampling_params=self._sampling(sampling, job, prompt),
            model=body.model or job.card.name,
            stream=bool(body.stream),
            stream_options=None if options is None else options.model_dump(),
            cache_salt=body.cache_salt,
            priority=body.priority,
            reasoning_ended=None if structured is None else not structured.after,
            reasoning_parser_kwargs=self._parser_kwargs(),
            kv_transfer_params=self.transfer,
            rendered=_facts(sampling, prompt),
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

    def _parser_kwargs(self) -> dict[str, Any] | None:
        if self.generation.text.family.reasoning is None or not isinstance(self.body, ChatRequest):
            return None
        return {"chat_template_kwargs": template_kwargs(self.body) or {}}


def refuse_not_rendered(body: SamplingFields) -> None:
    """Raise NotSupported for what token ids and sampling parameters cannot express."""
    if body.use_beam_search:
        raise NotSupported(
            "Beam search is not supported by the render endpoint", param="use_beam_search"
        )
    if getattr(body, "prompt_embeds", None):
        raise NotSupported(
            "prompt_embeds is not supported by the render endpoint", param="prompt_embeds"
        )


def _facts(sampling: SamplingParams, prompt: Prompt) -> RenderedFacts:
    structured, thinking = sampling.structured, sampling.thinking
    return RenderedFacts(
        bad_words_token_ids=[list(ids) for ids in prompt.bad_words_ids] or None,
        reasoning_end_token_ids=None if structured is None else structured.after,
        thinking=None if thinking is None else msgspec.structs.asdict(thinking),
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


def _take_transfer(body: SamplingFields) -> dict[str, Any] | None:
    """Remove and return the kv_transfer_params of a body: workers do not read them."""
    transfer, body.kv_transfer_params = body.kv_transfer_params, None
    return transfer


class _Renderer:
    """Builds requests as the base routes do, also for models that only a tokenizer serves."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._settings = gateway.settings
        self._builder = gateway.scale_out.builder

    async def chat(self, request: Request) -> Response:
        """The token ids and sampling parameters of a conversation."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, ChatRequest, self._settings)
            rendering = await self._chat(body, context)
        return json_response((await self._requests(rendering))[0])

    async def completion(self, request: Request) -> Response:
        """The token ids and sampling parameters of each prompt, as a list."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, CompletionRequest, self._settings)
            refuse_not_rendered(body)
            transfer = _take_transfer(body)
            generation = await build_completion(self._builder, body, context)
            await context.widen(len(generation.jobs), 1)
        return json_response(await self._requests(Rendering(body, generation, transfer)))

    async def message(self, request: Request) -> Response:
        """The token ids and sampling parameters of a conversation in Anthropic's shapes."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, MessagesRequest, self._settings)
            translation = await translate_body(body, context)
            await drop_useless_budget(
                self._gateway.scale_out.catalog,
                self._gateway.vocabularies,
                translation.chat,
                context,
            )
        with translation.client_paths():
            rendering = await self._chat(translation.chat, context)
            return json_response((await self._requests(rendering))[0])

    async def response(self, request: Request) -> Response:
        """The token ids and sampling parameters of a response's input."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, ResponsesRequest, self._settings)
            if body.previous_response_id is not None:
                raise NotSupported(
                    "previous_response_id is not supported by the stateless render endpoint",
                    param="previous_response_id",
                )
            transfer, body.kv_transfer_params = body.kv_transfer_params, None
            made = await prepare(self._builder, body, context, new_response_id())
        with made.translation.client_paths():
            rendering = Rendering(made.translation.chat, made.generation, transfer)
            return json_response((await self._requests(rendering))[0])

    async def _chat(self, body: ChatRequest, context: RequestContext) -> Rendering:
        refuse_not_rendered(body)
        transfer = _take_transfer(body)
        return Rendering(body, await build_chat(self._builder, body, context), transfer)

    async def _requests(self, rendering: Rendering) -> Sequence[RenderedRequest]:
        generation = rendering.generation
        prompts = await self._gateway.scale_out.tokenize(generation)
        return [rendering.request(*pair) for pair in zip(generation.jobs, prompts, strict=True)]


def render_endpoints(gateway: Gateway) -> dict[str, Endpoint]:
    """The routes' functions by path."""
    renderer = _Renderer(gateway)
    return {
        CHAT: renderer.chat,
        COMPLETION: renderer.completion,
        MESSAGES: renderer.message,
        RESPONSES: renderer.response,
    }
