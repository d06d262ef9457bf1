"""PreparedResponse: a validated request, ready to run: its chat, its events, its error paths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.http.off_loop import off_loop
from tokenmesh.services.gateway.openai.intake import Intake
from tokenmesh.services.gateway.responses.events import ResponseEvents
from tokenmesh.services.gateway.responses.items import Item
from tokenmesh.services.gateway.responses.raw_messages import RawMessages
from tokenmesh.services.gateway.responses.request import ResponsesRequest
from tokenmesh.services.gateway.responses.shapes import response_object
from tokenmesh.services.gateway.responses.tools import ServerTool
from tokenmesh.services.gateway.responses.translate import ResponsesTranslation, is_long, translate
from tokenmesh.shared.errors import TokenMeshError


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """One turn of a response; the first one's events are those of the response."""

    ask: GenerationRequest
    translation: ResponsesTranslation
    response: dict[str, Any]
    events: ResponseEvents


async def draft(
    intake: Intake,
    body: ResponsesRequest,
    exchange: RequestContext,
    response_id: str,
    *,
    created_s: float | None = None,
    previous: Sequence[Item] = (),
    served: Mapping[str, Sequence[ServerTool]] | None = None,
) -> PreparedResponse:
    """See `translate`. `created_s` (Unix time) None: now.

    Raises InvalidInput that names the client's own field.
    """
    translation = await off_loop(is_long(body, previous), translate, body, previous, served)
    exchange.warnings.extend(translation.warnings)
    try:
        ask = await intake.chat(translation.chat, exchange)
    except TokenMeshError as error:
        raise translation.places.rename(error) from error
    response = response_object(body, ask, response_id, created_s)
    events = ResponseEvents(
        response,
        translation.names,
        logprobs=ask.logprobs if body.shows_logprobs else None,
        raw=RawMessages(ask.text.vocabulary) if body.enable_response_messages else None,
    )
    return PreparedResponse(ask, translation, response, events)
