"""POST .../derender: what /inference/v1/generate answered, as the base route would have."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.errors import JSON
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.http.body import read_json
from tokenmesh.services.gateway.http.shortcut import Endpoint
from tokenmesh.services.gateway.scale_out.derender_intake import DerenderIntake
from tokenmesh.services.gateway.scale_out.derender_request import (
    DerenderChatRequest,
    DerenderCompletionRequest,
)
from tokenmesh.services.gateway.scale_out.derenderer import Derenderer
from tokenmesh.shared.telemetry import REQUEST_ID, span

CHAT: Final = "/v1/chat/completions/derender"
COMPLETION: Final = "/v1/completions/derender"


def derender_endpoints(gateway: Gateway) -> dict[str, Endpoint]:
    """The routes' functions by path."""
    scale_out, settings = gateway.scale_out, gateway.settings
    intake = DerenderIntake(scale_out.catalog, scale_out.intake, gateway.vocabularies)
    derenderer = Derenderer(intake, settings)

    async def derender_chat(request: Request) -> Response:
        """A chat's answer from token ids, whole or one chunk of a stream."""
        exchange = context_of(request.scope)
        body = await read_json(request, DerenderChatRequest, settings)
        with span("derender", {REQUEST_ID: exchange.request_id}):
            return Response(await derenderer.chat(body, exchange), media_type=JSON)

    async def derender_completion(request: Request) -> Response:
        """A plain completion's answer from token ids, whole or one chunk of a stream."""
        exchange = context_of(request.scope)
        body = await read_json(request, DerenderCompletionRequest, settings)
        with span("derender", {REQUEST_ID: exchange.request_id}):
            return Response(await derenderer.completion(body, exchange), media_type=JSON)

    return {CHAT: derender_chat, COMPLETION: derender_completion}
