"""POST .../render: what a base route would generate from, as bodies for /inference/v1/generate."""

from collections.abc import Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.anthropic.request import MessagesRequest
from tokenmesh.services.gateway.context import RequestContext, context_of
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.http.body import read_json
from tokenmesh.services.gateway.http.errors import NotSupported
from tokenmesh.services.gateway.http.middleware import Endpoint
from tokenmesh.services.gateway.http.sse import json_response
from tokenmesh.services.gateway.openai.chat_builder import build_chat
from tokenmesh.services.gateway.openai.completion_builder import build_completion
from tokenmesh.services.gateway.openai.request import ChatRequest, CompletionRequest
from tokenmesh.services.gateway.openai.sampling_fields import SamplingFields
from tokenmesh.services.gateway.responses.request import ResponsesRequest
from tokenmesh.services.gateway.responses.response_plan import prepare
from tokenmesh.services.gateway.routes.anthropic import drop_useless_budget, translate_body
from tokenmesh.services.gateway.scale_out.rendering import Rendering, refuse_not_rendered
from tokenmesh.services.gateway.scale_out.shapes import RenderedRequest
from tokenmesh.shared.ids import new_response_id
from tokenmesh.shared.telemetry import span

CHAT: Final = "/v1/chat/completions/render"
COMPLETION: Final = "/v1/completions/render"
MESSAGES: Final = "/v1/messages/render"
RESPONSES: Final = "/v1/responses/render"


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
