"""The FastAPI application: routes, error shapes, middleware."""

from typing import Final

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import tokenmesh
from tokenmesh.services.gateway import document
from tokenmesh.services.gateway.apis.table import APIS
from tokenmesh.services.gateway.core.admitted import AdmittedRoutes
from tokenmesh.services.gateway.core.errors import install_error_handlers
from tokenmesh.services.gateway.core.http.body import body_schema
from tokenmesh.services.gateway.core.http.middleware import RootPath
from tokenmesh.services.gateway.edge import Edge
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.config import Settings
from tokenmesh.shared.journal import Journal

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
    core, apis = gateway.core, gateway.apis
    settings = core.settings
    app: ASGIApp = AdmittedRoutes(make_routes(gateway), core, apis.is_exempt)
    app = Edge(app, apis, core.tenancy.keys, settings, core.requests)
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


def open_journals(bus: MessageBus, settings: Settings) -> dict[str, Journal]:
    """The journals of a gateway by its APIs; their streams are created at first use."""
    return {
        api.name: api.open_journal(bus, settings) for api in APIS if api.open_journal is not None
    }


def make_routes(gateway: Gateway) -> FastAPI:
    """FastAPI's part: all routes and their OpenAPI document."""
    core, root = gateway.core, gateway.core.settings.root_path
    app = FastAPI(
        title="TokenMesh",
        version=tokenmesh.__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # a route of operators makes the document once
        servers=[{"url": root}] if root else None,
    )
    install_error_handlers(app, gateway.apis.hint)
    for path, post in core.posts.items():
        schema = body_schema(post.body)
        app.post(path, tags=[post.tag], response_model=None, openapi_extra=schema)(post.endpoint)
    for routes in gateway.routes:
        for router in routes.routers:
            app.include_router(router)
    bodies = [post.body for post in core.posts.values()]
    bodies += [body for routes in gateway.routes for body in routes.bodies]
    has_keys = bool(core.tenancy.keys)
    document.complete(app, list(dict.fromkeys(bodies)), apis=gateway.apis, has_keys=has_keys)
    return app
