"""The scale-out routes: render, derender, generate and abort; 403 unless they are enabled."""

from typing import Final

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.anthropic.request import MessagesRequest
from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.http.body import body_schema, read_json
from tokenmesh.services.gateway.http.middleware import Endpoint
from tokenmesh.services.gateway.http.sse import JSON
from tokenmesh.services.gateway.openai.request import ChatRequest, CompletionRequest
from tokenmesh.services.gateway.responses.request import ResponsesRequest
from tokenmesh.services.gateway.routes import render
from tokenmesh.services.gateway.scale_out.derender_builder import DerenderBuilder
from tokenmesh.services.gateway.scale_out.derender_request import (
    DerenderChatRequest,
    DerenderCompletionRequest,
)
from tokenmesh.services.gateway.scale_out.derenderer import Derenderer
from tokenmesh.services.gateway.scale_out.generate_request import (
    AbortRequest,
    GenerateRequest,
    with_own_names,
)
from tokenmesh.services.gateway.scale_out.generate_response import GenerateWriter
from tokenmesh.shared.errors import Forbidden, InvalidInput
from tokenmesh.shared.telemetry import REQUEST_ID, span

DERENDER_CHAT: Final = "/v1/chat/completions/derender"
DERENDER_COMPLETION: Final = "/v1/completions/derender"
GENERATE: Final = "/inference/v1/generate"
ABORT: Final = "/inference/v1/abort_requests"

BODIES: Final[dict[str, type[BaseModel]]] = {
    render.CHAT: ChatRequest,
    render.COMPLETION: CompletionRequest,
    render.MESSAGES: MessagesRequest,
    render.RESPONSES: ResponsesRequest,
    DERENDER_CHAT: DerenderChatRequest,
    DERENDER_COMPLETION: DerenderCompletionRequest,
    GENERATE: GenerateRequest,
    ABORT: AbortRequest,
}


def scale_out_router(gateway: Gateway) -> APIRouter:
    """Each route with its function, or with the refusal."""
    router = APIRouter(tags=["scale-out"])
    if not gateway.scale_out.is_enabled:
        for path in BODIES:
            router.post(path, include_in_schema=False)(_refuse)
        return router
    endpoints = {
        **render.render_endpoints(gateway),
        **_derender_endpoints(gateway),
        GENERATE: _generate_endpoint(gateway),
        ABORT: _abort_endpoint(gateway),
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


def _derender_endpoints(gateway: Gateway) -> dict[str, Endpoint]:
    scale_out, settings = gateway.scale_out, gateway.settings
    builder = DerenderBuilder(scale_out.catalog, scale_out.builder, gateway.vocabularies)
    derenderer = Derenderer(builder, settings)

    async def derender_chat(request: Request) -> Response:
        """A chat's answer from token ids, whole or one chunk of a stream."""
        context = context_of(request.scope)
        body = await read_json(request, DerenderChatRequest, settings)
        with span("derender", {REQUEST_ID: context.request_id}):
            return Response(await derenderer.chat(body, context), media_type=JSON)

    async def derender_completion(request: Request) -> Response:
        """A plain completion's answer from token ids, whole or one chunk of a stream."""
        context = context_of(request.scope)
        body = await read_json(request, DerenderCompletionRequest, settings)
        with span("derender", {REQUEST_ID: context.request_id}):
            return Response(await derenderer.completion(body, context), media_type=JSON)

    return {DERENDER_CHAT: derender_chat, DERENDER_COMPLETION: derender_completion}


def _generate_endpoint(gateway: Gateway) -> Endpoint:
    async def generate(request: Request) -> Response:
        """Continue a prompt of token ids with token ids, whole or as a stream of chunks."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, GenerateRequest, gateway.settings)
            context.rename_error = with_own_names
            generation = await gateway.scale_out.tokens.build(body, context)
        return gateway.respond_abortable(generation, GenerateWriter(generation, body))

    return generate


def _abort_endpoint(gateway: Gateway) -> Endpoint:
    limit = gateway.settings.max_abort_requests

    async def abort_requests(request: Request) -> Response:
        """End running generate requests of the tenant by their ids; unknown ids are ignored."""
        body = await read_json(request, AbortRequest, gateway.settings)
        if len(body.request_ids) > limit:
            raise InvalidInput(
                f"request_ids holds {len(body.request_ids)} ids, at most {limit}",
                param="request_ids",
            )
        tenant = context_of(request.scope).access.tenant
        await gateway.scale_out.aborts.abort(tenant.name, body.request_ids)
        return Response()

    return abort_requests
