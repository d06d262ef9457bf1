"""POST /v1/chat/completions."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from tokenmesh.services.gateway.answer import Answer
from tokenmesh.services.gateway.body import read_json
from tokenmesh.services.gateway.chat_writer import ChatWriter
from tokenmesh.services.gateway.exchange import exchange_of
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.openai.chat_request import ChatRequest
from tokenmesh.services.gateway.routes.schema import body_schema
from tokenmesh.shared.telemetry import span


def chat_router(gateway: Gateway) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["generate"])

    @router.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation, whole or as a stream of chunks."""
        with span("validate"):
            body = await read_json(request, ChatRequest, gateway.settings)
            ask = await gateway.intake.chat(body, exchange_of(request.scope))
        return Answer(ask, gateway.pipeline, ChatWriter(ask), gateway.settings)

    return router
