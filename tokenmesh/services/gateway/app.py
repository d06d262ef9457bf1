"""The FastAPI application: routes, error shapes, middleware."""

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import tokenmesh
from tokenmesh.services.gateway.auth import ApiKeys
from tokenmesh.services.gateway.edge import Edge
from tokenmesh.services.gateway.error_response import install_error_handlers
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.openai.chat_request import ChatRequest
from tokenmesh.services.gateway.openai.completion_request import CompletionRequest
from tokenmesh.services.gateway.openai.tokenize_request import DetokenizeRequest, TokenizeRequest
from tokenmesh.services.gateway.routes.chat import chat_router
from tokenmesh.services.gateway.routes.completions import completions_router
from tokenmesh.services.gateway.routes.files import files_router
from tokenmesh.services.gateway.routes.health import health_router
from tokenmesh.services.gateway.routes.models import models_router
from tokenmesh.services.gateway.routes.schema import install_schemas
from tokenmesh.services.gateway.routes.tokenize import tokenize_router
from tokenmesh.services.gateway.routes_traces import traces_router

_ROUTERS = (
    chat_router,
    completions_router,
    models_router,
    tokenize_router,
    files_router,
    health_router,
)
_EXPOSED = ["x-request-id", "traceparent", "x-tokenmesh-warning", "retry-after"]


def make_app(gateway: Gateway) -> FastAPI:
    """Everything that HTTP clients see."""
    settings = gateway.settings
    app = FastAPI(
        title="TokenMesh",
        version=tokenmesh.__version__,
        docs_url="/docs" if settings.docs else None,
        redoc_url="/redoc" if settings.docs else None,
        openapi_url="/openapi.json" if settings.docs else None,
    )
    install_error_handlers(app)
    for make_router in _ROUTERS:
        app.include_router(make_router(gateway))
    app.include_router(traces_router(gateway.traces))
    install_schemas(app, [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest])
    keys = ApiKeys(settings.api_key_hashes)
    app.add_middleware(Edge, keys=keys, settings=settings, metrics=gateway.metrics)
    if settings.cors_origins:
        # Added last, so it is first: a preflight carries no key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
        )
    return app
