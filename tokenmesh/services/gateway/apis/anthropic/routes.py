"""POST /v1/messages and /v1/messages/count_tokens."""

from dataclasses import replace
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.apis.anthropic.request import CountTokensRequest, MessagesRequest
from tokenmesh.services.gateway.apis.anthropic.translation import is_long, translate
from tokenmesh.services.gateway.apis.anthropic.writer import MessagesWriter, TokenCount
from tokenmesh.services.gateway.apis.openai.chat_builder import build_chat
from tokenmesh.services.gateway.apis.openai.former_fields import refuse_former_fields
from tokenmesh.services.gateway.apis.openai.request import ChatRequest
from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.apis.openai.tokens import count_prompt_tokens
from tokenmesh.services.gateway.apis.openai.translation import TranslatedChat, warn_unknown
from tokenmesh.services.gateway.core.context import RequestContext, context_of
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.body import body_schema, read_json
from tokenmesh.services.gateway.core.http.endpoint import Endpoint
from tokenmesh.services.gateway.core.http.event_loop import off_loop
from tokenmesh.services.gateway.core.http.sse import json_response
from tokenmesh.services.gateway.core.mesh.catalog import Catalog
from tokenmesh.services.gateway.core.mesh.vocabularies import Vocabularies
from tokenmesh.shared.telemetry import span

PATH: Final = "/v1/messages"


def messages_endpoint(core: Core, builder: RequestBuilder) -> Endpoint:
    """The function of POST /v1/messages."""

    async def create_message(request: Request) -> Response:
        """Answer a conversation in Anthropic's shapes, whole or as a stream of events."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, MessagesRequest, core.settings)
            translation = await translate_body(body, context)
            chat = translation.chat
            await drop_useless_budget(core.mesh.catalog, core.mesh.vocabularies, chat, context)
            with translation.client_paths():
                generation = await build_chat(builder, chat, context)
        is_omitted = body.thinking is not None and body.thinking.display == "omitted"
        # Clients send the max_tokens of the largest models without checking this model's limit.
        jobs = tuple(replace(job, cuts_max_tokens=True) for job in generation.jobs)
        generation = replace(generation, jobs=jobs)
        writer = MessagesWriter(generation, translation.fields, shows_thinking=not is_omitted)
        context.rename_error = translation.fields.rename
        return core.generation.respond(generation, writer)

    return create_message


def messages_router(core: Core, builder: RequestBuilder) -> APIRouter:
    """The other routes of the API."""
    router = APIRouter(tags=["generate"])

    @router.post(f"{PATH}/count_tokens", openapi_extra=body_schema(CountTokensRequest))
    async def count_tokens(request: Request) -> Response:
        """Return how many tokens a message's prompt has, system prompt, tools and images
        included.
        """
        context = context_of(request.scope)
        body = await read_json(request, CountTokensRequest, core.settings)
        translation = await translate_body(body, context)
        with translation.client_paths():
            count = await count_prompt_tokens(core, builder, translation.chat, context)
        return json_response(TokenCount(count))

    return router


async def translate_body(body: CountTokensRequest, context: RequestContext) -> TranslatedChat:
    """The chat request of a body, with a warning that lists unknown fields."""
    refuse_former_fields(body.model_extra, type(body).model_fields)
    warn_unknown(list(body.model_extra or ()), context.warnings)
    return await off_loop(is_long(body) or context.has_large_body, translate, body)


async def drop_useless_budget(
    catalog: Catalog, vocabularies: Vocabularies, chat: ChatRequest, context: RequestContext
) -> None:
    """Ignore the token budget of reasoning, with a warning, if the model does not reason."""
    if chat.thinking_token_budget is None:
        return
    card = await catalog.find_soon(chat.model, context.request_id)
    if not (await vocabularies.get(card.name)).family.can_cut_reasoning:
        chat.thinking_token_budget = None
        context.warnings.append("thinking.budget_tokens ignored: the model does not reason")
