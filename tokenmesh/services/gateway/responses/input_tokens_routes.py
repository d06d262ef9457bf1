"""POST /v1/responses/input_tokens."""

from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.document.bodies import body_schema
from tokenmesh.services.gateway.errors import json_response
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.generation.prompt_length import count_prompt_tokens
from tokenmesh.services.gateway.http.body import read_json
from tokenmesh.services.gateway.http.off_loop import off_loop
from tokenmesh.services.gateway.responses.described import InputTokens
from tokenmesh.services.gateway.responses.request import ResponsesRequest
from tokenmesh.services.gateway.responses.translate import is_long, translate
from tokenmesh.shared.errors import TokenMeshError

PATH: Final = "/v1/responses/input_tokens"


def input_tokens_router(gateway: Gateway) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["responses"])

    @router.post(PATH, openapi_extra=body_schema(ResponsesRequest))
    async def count_input_tokens(request: Request) -> Response:
        """How many tokens a response's prompt would have, those of earlier responses included."""
        exchange = context_of(request.scope)
        body = await read_json(request, ResponsesRequest, gateway.settings)
        body, previous = await gateway.responses.maker.recall(body, exchange.access)
        translation = await off_loop(is_long(body, previous), translate, body, previous)
        exchange.warnings.extend(translation.warnings)
        try:
            count = await count_prompt_tokens(gateway, translation.chat, exchange)
        except TokenMeshError as error:
            raise translation.places.rename(error) from None
        return json_response(InputTokens(input_tokens=count))

    return router
