"""Ollama's routes: /api/chat, /api/generate, /api/embed, /api/embeddings and those of models."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import inf
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

import tokenmesh
from tokenmesh.services.gateway.apis.ollama.models import running, served_name, show, tags
from tokenmesh.services.gateway.apis.ollama.request import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaModel,
    OllamaShowRequest,
)
from tokenmesh.services.gateway.apis.ollama.translation import (
    translate_chat,
    translate_generate,
    translate_raw,
)
from tokenmesh.services.gateway.apis.ollama.writer import (
    LINES_HEADERS,
    WHOLE_MODEL,
    OllamaEmbeddings,
    OllamaWriter,
    embed,
    embed_one,
    rfc3339,
)
from tokenmesh.services.gateway.apis.openai.chat_builder import build_chat
from tokenmesh.services.gateway.apis.openai.completion_builder import build_completion
from tokenmesh.services.gateway.apis.openai.former_fields import refuse_former_fields
from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.apis.openai.translation import Json, TranslatedChat, warn_unknown
from tokenmesh.services.gateway.apis.pooling.fields import EmbeddingRequest
from tokenmesh.services.gateway.apis.pooling.inputs import check_input
from tokenmesh.services.gateway.apis.pooling.job_builder import PoolBuilder
from tokenmesh.services.gateway.core.context import RequestContext, context_of
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.generation.request import GenerationRequest
from tokenmesh.services.gateway.core.http.body import body_schema, read_json
from tokenmesh.services.gateway.core.http.endpoint import Post
from tokenmesh.services.gateway.core.http.errors import invalid
from tokenmesh.services.gateway.core.http.sse import json_response
from tokenmesh.services.gateway.core.pooling.job import PoolJob
from tokenmesh.shared.clock import now_s, wall_s
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.telemetry import span

PREFIX: Final = "/api/"
CHAT: Final = f"{PREFIX}chat"
GENERATE: Final = f"{PREFIX}generate"
EMBED: Final = f"{PREFIX}embed"
EMBEDDINGS: Final = f"{PREFIX}embeddings"
LISTS: Final = (f"{PREFIX}version", f"{PREFIX}tags", f"{PREFIX}ps")
"""Paths that read what the gateway knows."""
_EMPTY_MESSAGE: Final = {"role": "assistant", "content": ""}


class _OllamaRoutes:
    """The functions of the routes that run a model."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._settings = core.settings
        self._catalog = core.mesh.catalog
        self._builder = RequestBuilder(core)
        self._pool_builder = PoolBuilder(core)

    async def create_ollama_chat(self, request: Request) -> Response:
        """Answer a conversation in Ollama's shapes, whole or as lines of JSON."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, OllamaChatRequest, self._settings, any_type=True)
            given = self._begin(body, context)
            if not body.messages:
                return await self._loaded(body, context, given, {"message": _EMPTY_MESSAGE})
            translation = translate_chat(body, context.warnings)
            generation = await self._build(translation, context, body)
        writer = OllamaWriter(given, context.started_s, is_chat=True)
        return self._core.generation.respond(generation, writer, LINES_HEADERS)

    async def create_ollama_answer(self, request: Request) -> Response:
        """Answer a prompt in Ollama's shapes, whole or as lines of JSON."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, OllamaGenerateRequest, self._settings, any_type=True)
            given = self._begin(body, context)
            if not body.prompt and not body.suffix:
                return await self._loaded(body, context, given, {"response": ""})
            if body.raw:
                completion = translate_raw(body, context.warnings)
                built = await build_completion(self._builder, completion, context)
                generation = _fitting(built, body, context)
            else:
                translation = translate_generate(body, context.warnings)
                generation = await self._build(translation, context, body)
        writer = OllamaWriter(given, context.started_s, is_chat=False, is_raw=bool(body.raw))
        return self._core.generation.respond(generation, writer, LINES_HEADERS)

    async def create_ollama_embeddings(self, request: Request) -> Response:
        """Embed texts in Ollama's shapes."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, OllamaEmbedRequest, self._settings, any_type=True)
            given = self._begin(body, context)
            if not body.input:
                await self._load(body, context)
                empty = OllamaEmbeddings(
                    model=given, embeddings=[], total_duration=0, prompt_eval_count=0
                )
                return json_response(empty)
            fields = EmbeddingRequest(
                model=body.model,
                input=body.input,
                dimensions=body.dimensions,
                truncate_prompt_tokens=WHOLE_MODEL if body.truncate is not False else None,
            )
            job = await self._embedding_job(body, fields, context)
        return self._core.pool(job, partial(embed, fields, given))

    async def create_ollama_embedding(self, request: Request) -> Response:
        """Embed one text in the shape of Ollama's older route."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, OllamaEmbeddingsRequest, self._settings, any_type=True)
            self._begin(body, context)
            if not body.prompt:
                await self._load(body, context)
                return json_response({"embedding": []})
            fields = EmbeddingRequest(
                model=body.model, input=body.prompt, truncate_prompt_tokens=WHOLE_MODEL
            )
            job = await self._embedding_job(body, fields, context)
        return self._core.pool(job, partial(embed_one, fields))

    def _begin(self, body: OllamaModel, context: RequestContext) -> str:
        """Resolve the tag of the model in place; the name as the client gave it."""
        refuse_former_fields(body.model_extra, type(body).model_fields)
        warn_unknown(body.unknown_fields, context.warnings)
        given, body.model = body.model, served_name(body.model, self._catalog)
        return given

    async def _build(
        self, translation: TranslatedChat, context: RequestContext, body: OllamaModel
    ) -> GenerationRequest:
        context.rename_error = translation.fields.rename
        with translation.client_paths():
            built = await build_chat(self._builder, translation.chat, context)
            return _fitting(built, body, context)

    async def _load(self, body: OllamaModel, context: RequestContext) -> bool:
        """Load a model on demand, or unload it; whether it stays loaded. Raises Asleep."""
        wakes = self._core.mesh.calls.wakes
        card = await self._catalog.find_soon(body.model)
        context.model, context.asked_model = card.name, body.model
        keep_alive_s = _keep_alive_s(body, card, context)
        if not card.on_demand or (keep_alive_s is None and body.keep_alive_s == 0):
            return True
        if keep_alive_s != 0:
            deadline_s = now_s() + self._settings.request_timeout_s
            await wakes.wake(card.name, context.request_id, deadline_s)
        if keep_alive_s is not None:
            await wakes.set_keep_alive(card.name, keep_alive_s)
        return keep_alive_s != 0

    async def _loaded(
        self, body: OllamaModel, context: RequestContext, given: str, empty: Json
    ) -> Response:
        """The answer to a request that only loads a model, or unloads it."""
        stays = await self._load(body, context)
        ending = {"done": True, "done_reason": "load" if stays else "unload"}
        return json_response({"model": given, "created_at": rfc3339(wall_s()), **empty, **ending})

    async def _embedding_job(
        self, body: OllamaModel, fields: EmbeddingRequest, context: RequestContext
    ) -> PoolJob:
        """Raises InvalidInput, and what looking for the model raises."""
        check_input(fields)
        begin = self._pool_builder.begin
        job = await begin(fields, context, ("embed",), fields.dimensions)
        return replace(job, keep_alive_s=_keep_alive_s(body, job.card, context))


def posts(core: Core) -> Mapping[str, Post]:
    """The routes that run a model, by path."""
    routes = _OllamaRoutes(core)
    return {
        CHAT: Post(routes.create_ollama_chat, OllamaChatRequest),
        GENERATE: Post(routes.create_ollama_answer, OllamaGenerateRequest),
        EMBED: Post(routes.create_ollama_embeddings, OllamaEmbedRequest),
        EMBEDDINGS: Post(routes.create_ollama_embedding, OllamaEmbeddingsRequest),
    }


def _fitting(
    generation: GenerationRequest, body: OllamaModel, context: RequestContext
) -> GenerationRequest:
    """With its keep_alive, and num_predict cut to the room that the context has."""
    keep_alive_s = _keep_alive_s(body, generation.jobs[0].card, context)
    jobs = tuple(
        replace(job, cuts_max_tokens=True, keep_alive_s=keep_alive_s) for job in generation.jobs
    )
    return replace(generation, jobs=jobs)


def _keep_alive_s(body: OllamaModel, card: ModelCard, context: RequestContext) -> float | None:
    """Return what the request says of a model on demand; where it may not, only a warning."""
    if body.keep_alive is None:
        return None
    if not card.on_demand:
        context.warnings.append(f"keep_alive has no effect: {card.name} always stays loaded")
        return None
    if not context.access.is_admin:
        # The model sleeps for all tenants, or takes the memory of others for as long.
        context.warnings.append("keep_alive has no effect: it is for admin keys")
        return None
    return body.keep_alive_s


def models_router(core: Core) -> APIRouter:
    """The routes about models."""
    router = APIRouter(tags=["ollama"])
    catalog = core.mesh.catalog

    @router.get(f"{PREFIX}version")
    async def ollama_version() -> Response:
        """The version of TokenMesh."""
        return json_response({"version": tokenmesh.__version__})

    @router.get(f"{PREFIX}tags")
    async def ollama_tags() -> Response:
        """Every model that a live worker serves, by all of its names."""
        return json_response({"models": tags(catalog)})

    @router.get(f"{PREFIX}ps")
    async def ollama_ps() -> Response:
        """The models that have a worker which is awake."""
        found = ((card, awake_for_s(card)) for card in catalog.all())
        return json_response({"models": running((card, s) for card, s in found if s is not None)})

    def awake_for_s(card: ModelCard) -> float | None:
        """Return how long the model stays awake without requests; None: it sleeps."""
        loads = (each.beat.load for each in core.members.workers(card.name))
        awake = [load.sleeps_in_s for load in loads if load is not None and not load.sleep_level]
        return max((inf if each is None else each for each in awake), default=None)

    @router.post(f"{PREFIX}show", openapi_extra=body_schema(OllamaShowRequest))
    async def ollama_show(request: Request) -> Response:
        """Return what a model can do, and its sizes."""
        body = await read_json(request, OllamaShowRequest, core.settings, any_type=True)
        name = body.model or body.name
        if name is None:
            raise invalid("model", "is missing")
        card = await catalog.find_soon(served_name(name, catalog))
        if not card.generates:
            return json_response(show(card, calls_tools=False, thinks=False))
        family = (await core.mesh.vocabularies.get(card.name)).family
        has_tools, thinks = family.tools is not None, family.reasoning is not None
        return json_response(show(card, calls_tools=has_tools, thinks=thinks))

    return router
