"""The scale-out routes: render, derender, generate and abort; 403 unless they are enabled."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.apis.anthropic.request import MessagesRequest
from tokenmesh.services.gateway.apis.anthropic.routes import drop_useless_budget, translate_body
from tokenmesh.services.gateway.apis.cohere import routes as cohere
from tokenmesh.services.gateway.apis.cohere.request import CohereChatRequest
from tokenmesh.services.gateway.apis.openai.chat_builder import build_chat
from tokenmesh.services.gateway.apis.openai.completion_builder import build_completion
from tokenmesh.services.gateway.apis.openai.request import ChatRequest, CompletionRequest
from tokenmesh.services.gateway.apis.openai.sampling_fields import SamplingFields
from tokenmesh.services.gateway.apis.responses.request import ResponsesRequest
from tokenmesh.services.gateway.apis.responses.response_plan import prepare
from tokenmesh.services.gateway.apis.scale_out.derender_builder import (
    DerenderBuilder,
    Rendering,
    refuse_not_rendered,
)
from tokenmesh.services.gateway.apis.scale_out.derender_request import (
    DerenderChatRequest,
    DerenderCompletionRequest,
)
from tokenmesh.services.gateway.apis.scale_out.derenderer import Derenderer
from tokenmesh.services.gateway.apis.scale_out.generate_request import (
    AbortRequest,
    GenerateRequest,
    with_own_names,
)
from tokenmesh.services.gateway.apis.scale_out.generate_response import (
    AbortableResponse,
    GenerateWriter,
)
from tokenmesh.services.gateway.apis.scale_out.scale_out import ScaleOut
from tokenmesh.services.gateway.apis.scale_out.shapes import RenderedRequest
from tokenmesh.services.gateway.core.context import RequestContext, access_of, context_of
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.body import body_schema, read_json
from tokenmesh.services.gateway.core.http.endpoint import Endpoint
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid
from tokenmesh.services.gateway.core.http.sse import JSON, json_response
from tokenmesh.shared.errors import Forbidden
from tokenmesh.shared.ids import new_response_id
from tokenmesh.shared.telemetry import REQUEST_ID, span

RENDER_CHAT: Final = "/v1/chat/completions/render"
RENDER_COMPLETION: Final = "/v1/completions/render"
RENDER_MESSAGES: Final = "/v1/messages/render"
RENDER_COHERE: Final = f"{cohere.CHAT}/render"
RENDER_RESPONSES: Final = "/v1/responses/render"
DERENDER_CHAT: Final = "/v1/chat/completions/derender"
DERENDER_COMPLETION: Final = "/v1/completions/derender"
GENERATE: Final = "/inference/v1/generate"
ABORT: Final = "/inference/v1/abort_requests"

BODIES: Final[dict[str, type[BaseModel]]] = {
    RENDER_CHAT: ChatRequest,
    RENDER_COMPLETION: CompletionRequest,
    RENDER_MESSAGES: MessagesRequest,
    RENDER_COHERE: CohereChatRequest,
    RENDER_RESPONSES: ResponsesRequest,
    DERENDER_CHAT: DerenderChatRequest,
    DERENDER_COMPLETION: DerenderCompletionRequest,
    GENERATE: GenerateRequest,
    ABORT: AbortRequest,
}


class NotStateless(NotSupported):
    """A field that needs what is stored, in vLLM's words."""

    kind = "invalid_request_error"


def _take_transfer(body: SamplingFields) -> dict[str, Any] | None:
    """Remove and return the kv_transfer_params of a body: workers do not read them."""
    transfer, body.kv_transfer_params = body.kv_transfer_params, None
    return transfer


class _ScaleOutRoutes:
    """The functions of the routes.

    Requests are rendered as the base routes build them, also for models that only a tokenizer
    serves.
    """

    def __init__(self, core: Core, scale_out: ScaleOut) -> None:
        self._core = core
        self._scale_out = scale_out
        self._settings = core.settings
        self._builder = scale_out.builder
        builder = DerenderBuilder(scale_out.catalog, scale_out.builder, core.mesh.vocabularies)
        self._derenderer = Derenderer(builder, core.settings)

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
            transfer, offsets = _take_transfer(body), _take_offsets(body)
            generation = await build_completion(self._builder, body, context)
            await context.widen(len(generation.jobs), 1)
        return json_response(
            await self._requests(Rendering(body, generation, transfer, context.answer_id, offsets))
        )

    async def message(self, request: Request) -> Response:
        """The token ids and sampling parameters of a conversation in Anthropic's shapes."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, MessagesRequest, self._settings)
            translation = await translate_body(body, context)
            await drop_useless_budget(
                self._scale_out.catalog,
                self._core.mesh.vocabularies,
                translation.chat,
                context,
            )
        with translation.client_paths():
            rendering = await self._chat(translation.chat, context)
            return json_response((await self._requests(rendering))[0])

    async def cohere(self, request: Request) -> Response:
        """The token ids and sampling parameters of a conversation in Cohere's shapes."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, CohereChatRequest, self._settings)
            translation = await cohere.translate_body(body, context)
        with translation.client_paths():
            rendering = await self._chat(translation.chat, context)
            return json_response((await self._requests(rendering))[0])

    async def response(self, request: Request) -> Response:
        """The token ids and sampling parameters of a response's input."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, ResponsesRequest, self._settings)
            for name in ("conversation", "previous_response_id"):
                if getattr(body, name) is not None:
                    problem = "is not supported by the stateless render endpoint"
                    raise invalid(name, problem, NotStateless)
            transfer, body.kv_transfer_params = body.kv_transfer_params, None
            response_id = new_response_id()
            made = await prepare(self._builder, body, context, response_id)
        with made.translation.client_paths():
            given = body.request_id or response_id
            rendering = Rendering(made.translation.chat, made.generation, transfer, given)
            return json_response((await self._requests(rendering))[0])

    async def _chat(self, body: ChatRequest, context: RequestContext) -> Rendering:
        refuse_not_rendered(body)
        transfer, offsets = _take_transfer(body), _take_offsets(body)
        if body.prediction is not None:
            body.prediction = None
            context.warnings.append("prediction ignored: a rendered request has none")
        generation = await build_chat(self._builder, body, context)
        return Rendering(body, generation, transfer, context.answer_id, offsets)

    async def _requests(self, rendering: Rendering) -> Sequence[RenderedRequest]:
        generation = rendering.generation
        if rendering.returns_offsets:
            jobs = tuple(replace(job, returns_offsets=True) for job in generation.jobs)
            generation = replace(generation, jobs=jobs)
        prompts = await self._scale_out.tokenize(generation)
        return [rendering.request(*pair) for pair in zip(generation.jobs, prompts, strict=True)]

    async def derender_chat(self, request: Request) -> Response:
        """A chat's answer from token ids, whole or one chunk of a stream."""
        context = context_of(request.scope)
        body = await read_json(request, DerenderChatRequest, self._settings)
        with span("derender", {REQUEST_ID: context.request_id}):
            return Response(await self._derenderer.chat(body, context), media_type=JSON)

    async def derender_completion(self, request: Request) -> Response:
        """A plain completion's answer from token ids, whole or one chunk of a stream."""
        context = context_of(request.scope)
        body = await read_json(request, DerenderCompletionRequest, self._settings)
        with span("derender", {REQUEST_ID: context.request_id}):
            return Response(await self._derenderer.completion(body, context), media_type=JSON)

    async def generate(self, request: Request) -> Response:
        """Continue a prompt of token ids with token ids, whole or as a stream of chunks."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, GenerateRequest, self._settings)
            context.rename_error = with_own_names
            generation = await self._scale_out.tokens.build(body, context)
        writer, aborts = GenerateWriter(generation, body), self._scale_out.aborts
        return AbortableResponse(generation, writer, self._core.generation, aborts)

    async def abort_requests(self, request: Request) -> Response:
        """End running generate requests of the tenant by their ids; unknown ids are ignored."""
        body = await read_json(request, AbortRequest, self._settings)
        limit = self._settings.max_abort_requests
        if len(body.request_ids) > limit:
            raise invalid(
                "request_ids",
                f"holds {len(body.request_ids)} ids, at most {limit}",
            )
        tenant = access_of(request).tenant
        await self._scale_out.aborts.abort(tenant.name, body.request_ids)
        return Response()


def _take_offsets(body: SamplingFields) -> bool:
    """Return whether places of tokens are wanted; the field has no effect on generation."""
    wanted, body.return_token_offsets = bool(body.return_token_offsets), None
    return wanted


def scale_out_router(core: Core, scale_out: ScaleOut) -> APIRouter:
    """Each route with its function, or with the refusal."""
    router = APIRouter(tags=["scale-out"])
    if not scale_out.is_enabled:
        for path in BODIES:
            router.post(path, include_in_schema=False)(_refuse)
        return router
    routes = _ScaleOutRoutes(core, scale_out)
    endpoints: dict[str, Endpoint] = {
        RENDER_CHAT: routes.chat,
        RENDER_COMPLETION: routes.completion,
        RENDER_MESSAGES: routes.message,
        RENDER_COHERE: routes.cohere,
        RENDER_RESPONSES: routes.response,
        DERENDER_CHAT: routes.derender_chat,
        DERENDER_COMPLETION: routes.derender_completion,
        GENERATE: routes.generate,
        ABORT: routes.abort_requests,
    }
    for path, endpoint in endpoints.items():
        schema = body_schema(BODIES[path])
        router.post(path, response_model=None, openapi_extra=schema)(endpoint)
    return router


async def _refuse(_request: Request) -> Response:
    raise Forbidden(
        "Scale-out endpoints are disabled. "
        "Start the gateway with --enable-scale-out to enable them."
    )
