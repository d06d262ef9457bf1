"""POST /v1/messages and /v1/messages/count_tokens."""

from dataclasses import replace
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.anthropic.request import CountTokensRequest, MessagesRequest
from tokenmesh.services.gateway.anthropic.shapes import TokenCount
from tokenmesh.services.gateway.anthropic.translation import is_long, translate
from tokenmesh.services.gateway.anthropic.writer import MessagesWriter
from tokenmesh.services.gateway.context import RequestContext, context_of
from tokenmesh.services.gateway.document.bodies import body_schema
from tokenmesh.services.gateway.errors import json_response
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.generation.answer import GenerationResponse
from tokenmesh.services.gateway.generation.prompt_length import count_prompt_tokens
from tokenmesh.services.gateway.http.body import read_json
from tokenmesh.services.gateway.http.off_loop import off_loop
from tokenmesh.services.gateway.http.shortcut import Endpoint
from tokenmesh.services.gateway.mesh.catalog import Catalog
from tokenmesh.services.gateway.mesh.vocabularies import Vocabularies
from tokenmesh.services.gateway.openai.chat_request import ChatRequest
from tokenmesh.services.gateway.openai.renamed_answer import RenamedAnswer
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.telemetry import span

PATH: Final = "/v1/messages"


def messages_endpoint(gateway: Gateway) -> Endpoint:
    """The route's function."""

    async def create_message(request: Request) -> Response:
        """Answer a conversation in Anthropic's shapes, whole or as a stream of events."""
        exchange = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, MessagesRequest, gateway.settings)
            warn_unknown(body, exchange)
            translation = await off_loop(is_long(body), translate, body)
            await fit_thinking(gateway.catalog, gateway.vocabularies, translation.body, exchange)
            try:
                ask = await gateway.intake.chat(translation.body, exchange)
            except TokenMeshError as error:
                raise translation.places.rename(error) from None
        is_omitted = body.thinking is not None and body.thinking.display == "omitted"
        # Clients ask for as much as the largest models can write, without asking what this one can.
        ask = replace(ask, jobs=tuple(replace(job, cuts_max_tokens=True) for job in ask.jobs))
        writer = MessagesWriter(ask, translation.places, shows_thinking=not is_omitted)
        answer = GenerationResponse(ask, gateway, writer, exchange.started_s)
        return RenamedAnswer(answer, translation.places.rename)

    return create_message


def messages_router(gateway: Gateway) -> APIRouter:
    """The route beside it."""
    router = APIRouter(tags=["generate"])

    @router.post(f"{PATH}/count_tokens", openapi_extra=body_schema(CountTokensRequest))
    async def count_tokens(request: Request) -> Response:
        """How many tokens a message's prompt has, system prompt, tools and images included."""
        exchange = context_of(request.scope)
        body = await read_json(request, CountTokensRequest, gateway.settings)
        warn_unknown(body, exchange)
        translation = await off_loop(is_long(body), translate, body)
        try:
            count = await count_prompt_tokens(gateway, translation.body, exchange)
        except TokenMeshError as error:
            raise translation.places.rename(error) from None
        return json_response(TokenCount(count))

    return router


async def fit_thinking(
    catalog: Catalog, vocabularies: Vocabularies, body: ChatRequest, exchange: RequestContext
) -> None:
    """Clients ask for thinking whatever the model is: one that does not reason needs no bound."""
    if body.thinking_token_budget is None:
        return
    card = await catalog.find_soon(body.model, exchange.request_id)
    if not (await vocabularies.get(card.name)).family.can_cut_reasoning:
        body.thinking_token_budget = None
        exchange.warnings.append("thinking.budget_tokens ignored: the model does not reason")


def warn_unknown(body: CountTokensRequest, exchange: RequestContext) -> None:
    """Name fields that no version knows."""
    names = [name[:64] for name in list(body.model_extra or ())[:16]]
    if names:
        exchange.warnings.append(f"unknown fields ignored: {', '.join(names)}")
