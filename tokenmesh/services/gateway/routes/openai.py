"""POST /v1/chat/completions and /v1/completions, GET /v1/models and /v1/models/{id}."""

from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.http.body import read_json
from tokenmesh.services.gateway.http.middleware import Endpoint
from tokenmesh.services.gateway.http.sse import json_response
from tokenmesh.services.gateway.openai.chat_builder import build_chat
from tokenmesh.services.gateway.openai.chat_writer import ChatWriter
from tokenmesh.services.gateway.openai.completion_builder import build_completion
from tokenmesh.services.gateway.openai.completion_writer import CompletionWriter
from tokenmesh.services.gateway.openai.request import ChatRequest, CompletionRequest
from tokenmesh.services.gateway.openai.shapes import Model, ModelList, ModelPermission
from tokenmesh.shared.messages.adapters import AdapterCard
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.telemetry import span

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"


def chat_endpoint(gateway: Gateway) -> Endpoint:
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation, whole or as a stream of chunks."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, ChatRequest, gateway.settings)
            generation = await build_chat(gateway.builder, body, context)
        return gateway.respond(generation, ChatWriter(generation))

    return create_chat_completion


def completion_endpoint(gateway: Gateway) -> Endpoint:
    async def create_completion(request: Request) -> Response:
        """Continue one prompt or several, whole or as a stream of chunks."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, CompletionRequest, gateway.settings)
            generation = await build_completion(gateway.builder, body, context)
        writer = CompletionWriter(generation)
        return gateway.respond(generation, writer)

    return create_completion


def models_router(gateway: Gateway) -> APIRouter:
    """The routes of models."""
    router = APIRouter(tags=["models"])
    scale_out = gateway.scale_out
    catalog = scale_out.catalog if scale_out.is_enabled else gateway.catalog

    @router.get("/v1/models")
    async def list_models() -> Response:
        """Every model that a live worker serves, once for each of its names, and its adapters.

        With the scale-out routes also those that a tokenizer alone knows.
        """
        cards = catalog.all()
        names = ((card, name) for card in cards for name in catalog.names(card))
        models = [_model(card, name) for card, name in names]
        models += [_model(card, name) for name, card in catalog.splits()]
        models += [_adapter(card, each) for card in cards for each in catalog.adapters(card)]
        return json_response(ModelList(data=models))

    # A model's name may contain slashes.
    @router.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> Response:
        """One model by any of its names."""
        if not model_id:
            return await list_models()
        card = await catalog.find_soon(model_id)
        if card.adapter is not None:
            return json_response(_adapter(card, card.adapter))
        return json_response(_model(card, model_id))

    return router


def _adapter(card: ModelCard, adapter: AdapterCard) -> Model:
    return _model(card, adapter.name, adapter.created_s, parent=card.name)


def _model(
    card: ModelCard, name: str, created_s: float | None = None, parent: str | None = None
) -> Model:
    created = int(card.created_s if created_s is None else created_s)
    return Model(
        id=name,
        created=created,
        root=card.name,
        parent=parent,
        max_model_len=card.max_model_len,
        permission=[ModelPermission(id=f"modelperm-{name}", created=created)],
        tasks=[*(["generate"] if card.generates else []), *card.tasks],
    )
