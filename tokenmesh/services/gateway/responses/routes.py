"""POST /v1/responses."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.generation.answer import GenerationResponse
from tokenmesh.services.gateway.http.body import read_json
from tokenmesh.services.gateway.http.shortcut import Endpoint
from tokenmesh.services.gateway.openai.renamed_answer import RenamedAnswer
from tokenmesh.services.gateway.responses.draft import draft
from tokenmesh.services.gateway.responses.request import ResponsesRequest
from tokenmesh.services.gateway.responses.writer import ResponseWriter
from tokenmesh.shared.ids import RequestId, new_response_id
from tokenmesh.shared.telemetry import span

PATH: Final = "/v1/responses"


def response_endpoint(gateway: Gateway) -> Endpoint:
    """The route's function."""

    maker = gateway.responses.maker

    async def create_response(request: Request) -> Response:
        """Answer a conversation as items, whole or as a stream of events."""
        exchange = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, ResponsesRequest, gateway.settings)
            may_forget = body.store is None
            body = maker.resolve(body)
            response_id = new_response_id()
            if not exchange.is_own_id:
                # The trace is found by the response's id then.
                exchange.request_id = RequestId(response_id)
            if maker.makes(body):
                return await maker.make(body, response_id, exchange, may_forget=may_forget)
            made = await draft(gateway.intake, body, exchange, response_id)
        writer = ResponseWriter(made.events, made.translation.places)
        answer = GenerationResponse(made.ask, gateway, writer, exchange.started_s)
        return RenamedAnswer(answer, made.translation.places.rename)

    return create_response
