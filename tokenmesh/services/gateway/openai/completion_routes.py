"""POST /v1/completions."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.generation.answer import GenerationResponse
from tokenmesh.services.gateway.http.body import read_json
from tokenmesh.services.gateway.http.shortcut import Endpoint
from tokenmesh.services.gateway.openai.completion_request import CompletionRequest
from tokenmesh.services.gateway.openai.completion_writer import CompletionWriter
from tokenmesh.shared.telemetry import span

PATH: Final = "/v1/completions"


def completion_endpoint(gateway: Gateway) -> Endpoint:
    """The route's function."""

    async def create_completion(request: Request) -> Response:
        """Continue one prompt or several, whole or as a stream of chunks."""
        exchange = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, CompletionRequest, gateway.settings)
            ask = await gateway.intake.completion(body, exchange)
        return GenerationResponse(ask, gateway, CompletionWriter(ask), exchange.started_s)

    return create_completion
