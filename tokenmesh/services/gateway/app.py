"""The FastAPI application: routes, error shapes, middleware."""

from collections.abc import Mapping
from typing import Final

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

import tokenmesh
from tokenmesh.services.gateway import document
from tokenmesh.services.gateway.apis.anthropic import routes as anthropic
from tokenmesh.services.gateway.apis.anthropic.request import CountTokensRequest, MessagesRequest
from tokenmesh.services.gateway.apis.audio.request import TranscriptionRequest, TranslationRequest
from tokenmesh.services.gateway.apis.batches import routes as batches
from tokenmesh.services.gateway.apis.batches.logs import open_batch_journal
from tokenmesh.services.gateway.apis.batches.service import BatchRunner
from tokenmesh.services.gateway.apis.cohere import routes as cohere
from tokenmesh.services.gateway.apis.cohere.request import CohereChatRequest
from tokenmesh.services.gateway.apis.files import routes as files
from tokenmesh.services.gateway.apis.openai import routes as openai
from tokenmesh.services.gateway.apis.openai import tokens
from tokenmesh.services.gateway.apis.openai.request import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tokenmesh.services.gateway.apis.operator import admin
from tokenmesh.services.gateway.apis.operator import routes as operation
from tokenmesh.services.gateway.apis.pooling import generative_route as generative_scoring
from tokenmesh.services.gateway.apis.pooling import routes as pooling
from tokenmesh.services.gateway.apis.pooling.generative import GenerativeScoringRequest
from tokenmesh.services.gateway.apis.realtime.routes import realtime_router
from tokenmesh.services.gateway.apis.responses import routes as responses
from tokenmesh.services.gateway.apis.responses.request import ResponsesRequest
from tokenmesh.services.gateway.apis.responses.response_logs import open_journal
from tokenmesh.services.gateway.apis.sagemaker import routes as sagemaker
from tokenmesh.services.gateway.apis.scale_out import routes as scale_out
from tokenmesh.services.gateway.core.admitted import AdmittedRoutes
from tokenmesh.services.gateway.core.errors import install_error_handlers
from tokenmesh.services.gateway.core.files.contents import open_file_journal
from tokenmesh.services.gateway.core.http.body import body_schema
from tokenmesh.services.gateway.core.http.endpoint import Endpoint
from tokenmesh.services.gateway.core.http.local_call import LocalCalls
from tokenmesh.services.gateway.core.http.middleware import RootPath
from tokenmesh.services.gateway.core.tenancy.usage import usage_router
from tokenmesh.services.gateway.edge import Edge
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.mesh import ServiceSettings
from tokenmesh.shared.ids import InstanceId
from tokenmesh.shared.journal import Journals

_BODIES: Final[dict[str, type[BaseModel]]] = {
    openai.CHAT: ChatRequest,
    openai.BATCH_CHAT: openai.BatchChatRequest,
    openai.COMPLETIONS: CompletionRequest,
    anthropic.PATH: MessagesRequest,
    **dict.fromkeys((cohere.CHAT, cohere.OWN_CHAT), CohereChatRequest),
    responses.PATH: ResponsesRequest,
    generative_scoring.PATH: GenerativeScoringRequest,
    **pooling.BODIES,
}
_OTHER_BODIES: Final[tuple[type[BaseModel], ...]] = (
    TokenizeRequest,
    DetokenizeRequest,
    CountTokensRequest,
    batches.BatchRequest,
    *responses.CONVERSATION_BODIES,
    TranscriptionRequest,
    TranslationRequest,
)
_ROUTERS: Final = (
    openai.models_router,
    lambda gateway: usage_router(gateway.usage),
    tokens.tokenize_router,
    files.files_router,
    batches.batches_router,
    files.audio_router,
    operation.health_router,
    operation.mesh_router,
    anthropic.messages_router,
    realtime_router,
    responses.input_tokens_router,
    responses.stored_responses_router,
    responses.conversations_router,
)
_EXPOSED: Final = [
    "x-request-id",
    "traceparent",
    "x-tokenmesh-warning",
    "retry-after",
    "endpoint-load-metrics",
    *(
        f"x-ratelimit-{value}-{unit}"
        for unit in ("requests", "tokens")
        for value in ("limit", "remaining", "reset")
    ),
]


def make_app(gateway: Gateway) -> ASGIApp:
    """The whole application; layers are added from the inside out."""
    settings, endpoints = gateway.settings, make_endpoints(gateway)
    app: ASGIApp = AdmittedRoutes(
        make_routes(gateway, endpoints),
        endpoints | {path: post.endpoint for path, post in gateway.core.posts.items()},
        gateway.admission,
        gateway.bodies,
        settings,
        gateway.apis,
    )
    app = Edge(app, gateway.apis, gateway.keys, settings, gateway.requests)
    if settings.root_path:
        app = RootPath(app, settings.root_path)
    if not settings.cors_origins:
        return app
    # Outermost: a preflight has no API key.
    return CORSMiddleware(
        app,
        allow_origins=list(settings.cors_origins),
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=_EXPOSED,
    )


def open_journals(bus: MessageBus, settings: Settings) -> Journals:
    """The journals of a gateway; their streams are created at first use."""
    return Journals(
        responses=open_journal(bus, settings.responses),
        files=open_file_journal(bus, settings),
        batches=open_batch_journal(bus, settings),
    )


def make_batch_runner(gateway: Gateway, settings: ServiceSettings) -> BatchRunner:
    """What works on batches: it sends their requests to this gateway's own endpoints."""
    endpoints = make_endpoints(gateway)
    served = {path: endpoints[path] for path in batches.ENDPOINTS}
    app = AdmittedRoutes(
        _no_route, served, gateway.admission, gateway.bodies, gateway.settings, gateway.apis
    )
    return BatchRunner(
        gateway.batches,
        LocalCalls(app),
        gateway.bus,
        is_alive=lambda owner: gateway.members.get(InstanceId(owner)) is not None,
        tenant_of=gateway.keys.tenant,
        delay_s=settings.missed_beats * settings.beat_interval_s,
        metrics=gateway.metrics,
    )


async def _no_route(scope: Scope, _receive: Receive, _send: Send) -> None:
    raise AssertionError(f"a batch has no endpoint {scope['path']}")


def make_endpoints(gateway: Gateway) -> dict[str, Endpoint]:
    return {
        openai.CHAT: openai.chat_endpoint(gateway),
        openai.BATCH_CHAT: openai.chat_batch_endpoint(gateway),
        openai.COMPLETIONS: openai.completion_endpoint(gateway),
        anthropic.PATH: anthropic.messages_endpoint(gateway),
        **dict.fromkeys((cohere.CHAT, cohere.OWN_CHAT), cohere.cohere_endpoint(gateway)),
        responses.PATH: responses.response_endpoint(gateway),
        generative_scoring.PATH: generative_scoring.scoring_endpoint(gateway),
        **pooling.pooling_endpoints(gateway),
    }


def make_routes(gateway: Gateway, endpoints: Mapping[str, Endpoint]) -> FastAPI:
    """FastAPI's part: all routes and their OpenAPI document."""
    docs, root = gateway.settings.docs, gateway.settings.root_path
    app = FastAPI(
        title="TokenMesh",
        version=tokenmesh.__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # `docs_router` makes the document once
        servers=[{"url": root}] if root else None,
    )
    install_error_handlers(app)
    for path, endpoint in endpoints.items():
        schema = body_schema(_BODIES[path])
        tag = "pooling" if path in pooling.BODIES else "generate"
        app.post(path, tags=[tag], response_model=None, openapi_extra=schema)(endpoint)
    for path, post in gateway.core.posts.items():
        schema = body_schema(post.body)
        app.post(path, tags=[post.tag], response_model=None, openapi_extra=schema)(post.endpoint)
    for routes in gateway.routes:
        for router in routes.routers:
            app.include_router(router)
    for make_router in _ROUTERS:
        app.include_router(make_router(gateway))
    app.include_router(sagemaker.sagemaker_router(gateway, endpoints))
    app.include_router(scale_out.scale_out_router(gateway))
    app.include_router(operation.traces_router(gateway.traces))
    app.include_router(operation.console_router(gateway))
    if docs:
        app.include_router(operation.docs_router(gateway))
    if gateway.settings.tokenizer_info:
        app.include_router(tokens.tokenizer_info_router(gateway))
    bodies = [*_BODIES.values(), *_OTHER_BODIES]
    bodies += [post.body for post in gateway.core.posts.values()]
    bodies += [body for api in gateway.apis.apis for body in api.bodies]
    if gateway.settings.admin_routes:
        app.include_router(admin.admin_router(gateway))
        app.include_router(admin.adapters_router(gateway))
        bodies += admin.BODIES
    if gateway.scale_out.is_enabled:
        bodies += scale_out.BODIES.values()
    document.complete(
        app, list(dict.fromkeys(bodies)), apis=gateway.apis, has_keys=bool(gateway.keys)
    )
    return app
