"""POST /inference/v1/generate and /inference/v1/abort_requests: tokens in, tokens out."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.http.body import read_json
from tokenmesh.services.gateway.http.shortcut import Endpoint
from tokenmesh.services.gateway.openai.renamed_answer import RenamedAnswer
from tokenmesh.services.gateway.scale_out.field_names import own_names
from tokenmesh.services.gateway.scale_out.generate_answer import GenerateAnswer
from tokenmesh.services.gateway.scale_out.generate_request import AbortRequest, GenerateRequest
from tokenmesh.services.gateway.scale_out.generate_writer import GenerateWriter
from tokenmesh.shared.errors import InvalidInput, TokenMeshError
from tokenmesh.shared.telemetry import span

PATH: Final = "/inference/v1/generate"
ABORT: Final = "/inference/v1/abort_requests"


def generate_endpoint(gateway: Gateway) -> Endpoint:
    """The route's function."""

    async def generate(request: Request) -> Response:
        """Continue a prompt of token ids with token ids, whole or as a stream of chunks."""
        exchange = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, GenerateRequest, gateway.settings)
            try:
                ask = await gateway.scale_out.tokens.ask(body, exchange)
            except TokenMeshError as error:
                raise own_names(error) from None
        answer = GenerateAnswer(ask, gateway, GenerateWriter(ask, body), exchange.started_s)
        return RenamedAnswer(answer, own_names)

    return generate


def abort_endpoint(gateway: Gateway) -> Endpoint:
    """The route's function."""

    limit = gateway.settings.max_abort_requests

    async def abort_requests(request: Request) -> Response:
        """End running generate requests of the tenant by their ids; unknown ids are ignored."""
        body = await read_json(request, AbortRequest, gateway.settings)
        if len(body.request_ids) > limit:
            raise InvalidInput(
                f"request_ids holds {len(body.request_ids)} ids, at most {limit}",
                param="request_ids",
            )
        exchange = context_of(request.scope)
        await gateway.scale_out.aborts.abort(exchange.access.tenant.name, body.request_ids)
        return Response()

    return abort_requests
