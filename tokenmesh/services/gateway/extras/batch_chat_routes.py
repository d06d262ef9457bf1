"""POST /v1/chat/completions/batch."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.extras.batch_chat import joined
from tokenmesh.services.gateway.extras.batch_chat_request import BatchChatRequest
from tokenmesh.services.gateway.extras.batch_chat_writer import BatchWriter
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.generation.answer import GenerationResponse
from tokenmesh.services.gateway.http.body import read_json
from tokenmesh.services.gateway.http.shortcut import Endpoint
from tokenmesh.shared.telemetry import span

PATH: Final = "/v1/chat/completions/batch"


def chat_batch_endpoint(gateway: Gateway) -> Endpoint:
    """The route's function."""

    async def create_chat_completion_batch(request: Request) -> Response:
        """Answer several conversations in one body."""
        exchange = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, BatchChatRequest, gateway.settings)
            asks = await gateway.intake.chat_batch(body, exchange)
        return GenerationResponse(joined(asks), gateway, BatchWriter(asks), exchange.started_s)

    return create_chat_completion_batch
