"""POST /v1/completions."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from tokenmesh.services.gateway.answer import Answer
from tokenmesh.services.gateway.body import read_json
from tokenmesh.services.gateway.completion_writer import CompletionWriter
from tokenmesh.services.gateway.exchange import exchange_of
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.openai.completion_request import CompletionRequest
from tokenmesh.services.gateway.routes.schema import body_schema
from tokenmesh.shared.telemetry import span


def completions_router(gateway: Gateway) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["generate"])

    @router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
    async def create_completion(request: Request) -> Response:
        """Continue one prompt or several, whole or as a stream of chunks."""
        with span("validate"):
            body = await read_json(request, CompletionRequest, gateway.settings)
            ask = await gateway.intake.completion(body, exchange_of(request.scope))
        return Answer(ask, gateway.pipeline, CompletionWriter(ask), gateway.settings)

    return router
