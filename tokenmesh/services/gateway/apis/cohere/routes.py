"""POST /cohere/v2/chat and /v2/chat."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.apis.cohere.request import CohereChatRequest
from tokenmesh.services.gateway.apis.cohere.translation import is_long, translate
from tokenmesh.services.gateway.apis.cohere.writer import CohereWriter
from tokenmesh.services.gateway.apis.openai.chat_builder import build_chat
from tokenmesh.services.gateway.apis.openai.former_fields import refuse_former_fields
from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.apis.openai.translation import TranslatedChat, warn_unknown
from tokenmesh.services.gateway.core.context import RequestContext, context_of
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.body import read_json
from tokenmesh.services.gateway.core.http.endpoint import Endpoint
from tokenmesh.services.gateway.core.http.event_loop import off_loop
from tokenmesh.shared.telemetry import span

CHAT: Final = "/cohere/v2/chat"
"""vLLM's path; Cohere's own is the next one."""
OWN_CHAT: Final = "/v2/chat"
_CITATIONS: Final = "citation_options ignored: answers have no citations"


def cohere_endpoint(core: Core, builder: RequestBuilder) -> Endpoint:
    """The function of POST /cohere/v2/chat."""

    async def cohere_chat(request: Request) -> Response:
        """Answer a conversation in Cohere's shapes, whole or as a stream of events."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, CohereChatRequest, core.settings)
            translation = await translate_body(body, context)
            with translation.client_paths():
                generation = await build_chat(builder, translation.chat, context)
        context.rename_error = translation.fields.rename
        is_reasoning_model = core.settings.cohere_is_reasoning_model
        writer = CohereWriter(generation, translation.fields, is_reasoning_model=is_reasoning_model)
        return core.generation.respond(generation, writer)

    return cohere_chat


async def translate_body(body: CohereChatRequest, context: RequestContext) -> TranslatedChat:
    """The chat request of a body, with warnings about what has no effect."""
    refuse_former_fields(body.model_extra, CohereChatRequest.model_fields)
    warn_unknown(list(body.model_extra or ()), context.warnings)
    mode = str((body.citation_options or {}).get("mode", "")).upper()
    if body.citation_options is not None and mode not in ("OFF", "DISABLED"):
        context.warnings.append(_CITATIONS)
    return await off_loop(is_long(body) or context.has_large_body, translate, body)
