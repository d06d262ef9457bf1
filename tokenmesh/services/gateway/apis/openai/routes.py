"""OpenAI's routes of chats, also several in one request, of completions, and of models."""

from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.apis.openai.batch_chat import (
    BatchChatRequest,
    BatchWriter,
    build_batch,
    joined,
)
from tokenmesh.services.gateway.apis.openai.chat_builder import build_chat
from tokenmesh.services.gateway.apis.openai.chat_writer import ChatWriter
from tokenmesh.services.gateway.apis.openai.completion_builder import build_completion
from tokenmesh.services.gateway.apis.openai.completion_writer import CompletionWriter
from tokenmesh.services.gateway.apis.openai.request import (
    ChatRequest,
    CompletionRequest,
)
from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.apis.openai.shapes import (
    Model,
    ModelDrafts,
    ModelList,
    ModelParallelism,
    ModelPermission,
)
from tokenmesh.services.gateway.core.context import access_of, context_of
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.body import read_json
from tokenmesh.services.gateway.core.http.endpoint import Endpoint
from tokenmesh.services.gateway.core.http.sse import json_response
from tokenmesh.shared.messages.adapters import AdapterCard
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.telemetry import span

CHAT: Final = "/v1/chat/completions"
BATCH_CHAT: Final = "/v1/chat/completions/batch"
COMPLETIONS: Final = "/v1/completions"


def chat_endpoint(core: Core, builder: RequestBuilder) -> Endpoint:
    settings = core.settings

    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation, whole or as a stream of chunks."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, ChatRequest, settings)
            generation = await build_chat(builder, body, context)
        return core.generation.respond(generation, ChatWriter(generation))

    return create_chat_completion


def completion_endpoint(core: Core, builder: RequestBuilder) -> Endpoint:
    async def create_completion(request: Request) -> Response:
        """Continue one prompt or several, whole or as a stream of chunks."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, CompletionRequest, core.settings)
            generation = await build_completion(builder, body, context)
        writer = CompletionWriter(generation)
        return core.generation.respond(generation, writer)

    return create_completion


def models_router(core: Core) -> APIRouter:
    """The routes of models."""
    router = APIRouter(tags=["models"])
    catalog = core.mesh.rendered

    @router.get("/v1/models")
    async def list_models(request: Request) -> Response:
        """Every model that a live worker serves, once for each of its names, and its adapters.

        With the scale-out routes also those that a tokenizer alone knows.
        """
        cards = catalog.all()
        names = ((card, name) for card in cards for name in catalog.names(card))
        models = [_model(card, name) for card, name in names]
        models += [_model(card, name) for name, card in catalog.splits()]
        # Where an adapter's files are is for operators, not for tenants with keys.
        shows = access_of(request).is_admin
        models += [_adapter(card, a, shows=shows) for card in cards for a in catalog.adapters(card)]
        return json_response(ModelList(data=models))

    # A model's name may contain slashes.
    @router.get("/v1/models/{model_id:path}")
    async def get_model(request: Request, model_id: str) -> Response:
        """One model by any of its names."""
        if not model_id:
            return await list_models(request)
        card = await catalog.find_soon(model_id)
        if card.adapter is not None:
            return json_response(_adapter(card, card.adapter, shows=access_of(request).is_admin))
        return json_response(_model(card, model_id))

    return router


def _adapter(card: ModelCard, adapter: AdapterCard, *, shows: bool) -> Model:
    root = (shows and adapter.source) or adapter.name
    return _model(card, adapter.name, adapter.created_s, parent=card.name, root=root)


def _model(
    card: ModelCard,
    name: str,
    created_s: float | None = None,
    parent: str | None = None,
    root: str | None = None,
) -> Model:
    created = int(card.created_s if created_s is None else created_s)
    return Model(
        id=name,
        created=created,
        root=root or card.name,
        parent=parent,
        max_model_len=card.max_model_len,
        permission=[ModelPermission(id=f"modelperm-{name}", created=created)],
        tasks=[*(["generate"] if card.generates else []), *card.tasks],
        speculative_config=ModelDrafts(card.draft_method, card.max_drafts)
        if card.draft_method
        else None,
        kv_tiers=card.kv_tiers,
        parallel_config=ModelParallelism(card.ranks // card.stages, card.stages)
        if card.ranks > 1
        else None,
    )


def chat_batch_endpoint(core: Core, builder: RequestBuilder) -> Endpoint:
    async def create_chat_completion_batch(request: Request) -> Response:
        """Answer several conversations in one body."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, BatchChatRequest, core.settings)
            requests = await build_batch(builder, body, context)
        writer = BatchWriter(requests)
        return core.generation.respond(joined(requests), writer)

    return create_chat_completion_batch
