"""The route of scores by a next token, which a model that generates makes."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.apis.openai.former_fields import refuse_former_fields
from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.apis.openai.translation import warn_unknown
from tokenmesh.services.gateway.apis.pooling.generative import (
    NAMES,
    GenerativeScoringRequest,
    ScoringWriter,
    build_scoring,
)
from tokenmesh.services.gateway.core.context import context_of
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.body import read_json
from tokenmesh.services.gateway.core.http.endpoint import Endpoint
from tokenmesh.shared.telemetry import span

PATH: Final = "/generative_scoring"


def scoring_endpoint(core: Core) -> Endpoint:
    """The function of POST /generative_scoring."""
    builder = RequestBuilder(core)

    async def generative_scoring(request: Request) -> Response:
        """Return how likely a label follows the query and each item, by a model that generates."""
        context = context_of(request.scope)
        context.rename_error = NAMES.rename
        with span("validate"):
            body = await read_json(request, GenerativeScoringRequest, core.settings)
            refuse_former_fields(body.model_extra, GenerativeScoringRequest.model_fields)
            warn_unknown(list(body.model_extra or ()), context.warnings)
            tokenizer = core.pooling.tokenizer
            generation = await build_scoring(builder, tokenizer, body, context)
        return core.generation.respond(generation, ScoringWriter(generation.head, body))

    return generative_scoring
