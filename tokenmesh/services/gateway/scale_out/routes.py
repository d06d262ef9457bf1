"""The scale-out routes: render, derender, generate and abort; 403 unless they are enabled."""

from typing import Final

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.anthropic.request import MessagesRequest
from tokenmesh.services.gateway.document.bodies import body_schema
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.openai.chat_request import ChatRequest
from tokenmesh.services.gateway.openai.completion_request import CompletionRequest
from tokenmesh.services.gateway.responses.request import ResponsesRequest
from tokenmesh.services.gateway.scale_out import derender_routes as derender
from tokenmesh.services.gateway.scale_out import generate_routes as generate
from tokenmesh.services.gateway.scale_out import render_routes as render
from tokenmesh.services.gateway.scale_out.derender_request import (
    DerenderChatRequest,
    DerenderCompletionRequest,
)
from tokenmesh.services.gateway.scale_out.derender_routes import derender_endpoints
from tokenmesh.services.gateway.scale_out.generate_request import AbortRequest, GenerateRequest
from tokenmesh.services.gateway.scale_out.generate_routes import abort_endpoint, generate_endpoint
from tokenmesh.services.gateway.scale_out.render_routes import render_endpoints
from tokenmesh.shared.errors import Forbidden

BODIES: Final[dict[str, type[BaseModel]]] = {
    render.CHAT: ChatRequest,
    render.COMPLETION: CompletionRequest,
    render.MESSAGES: MessagesRequest,
    render.RESPONSES: ResponsesRequest,
    derender.CHAT: DerenderChatRequest,
    derender.COMPLETION: DerenderCompletionRequest,
    generate.PATH: GenerateRequest,
    generate.ABORT: AbortRequest,
}


def scale_out_router(gateway: Gateway) -> APIRouter:
    """The routes, each with its function or with the refusal."""
    router = APIRouter(tags=["scale-out"])
    if not gateway.scale_out.is_enabled:
        for path in BODIES:
            router.post(path, include_in_schema=False)(_refuse)
        return router
    endpoints = {
        **render_endpoints(gateway),
        **derender_endpoints(gateway),
        generate.PATH: generate_endpoint(gateway),
        generate.ABORT: abort_endpoint(gateway),
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
