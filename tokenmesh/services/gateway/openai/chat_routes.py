"""POST /v1/chat/completions."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.generation.answer import GenerationResponse
from tokenmesh.services.gateway.http.body import read_json
from tokenmesh.services.gateway.http.shortcut import Endpoint
from tokenmesh.services.gateway.openai.chat_request import ChatRequest
from tokenmesh.services.gateway.openai.chat_writer import ChatWriter
from tokenmesh.shared.telemetry import span

PATH: Final = "/v1/chat/completions"


def chat_endpoint(gateway: Gateway) -> Endpoint:
    """The route's function."""

    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation, whole or as a stream of chunks."""
        exchange = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, ChatRequest, gateway.settings)
            ask = await gateway.intake.chat(body, exchange)
        return GenerationResponse(ask, gateway, ChatWriter(ask), exchange.started_s)

    return create_chat_completion
