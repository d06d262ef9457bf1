"""GET /, /console, its files, and /console/events: what an open page follows."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.operations.console.pages import (
    PAGE,
    ConsolePages,
    PageResponse,
    asset_response,
)
from tokenmesh.services.gateway.operations.console.state import StateReader
from tokenmesh.shared.errors import Forbidden

_Limit = Annotated[int | None, Query(ge=1, description="End after so many messages.")]


def console_router(gateway: Gateway) -> APIRouter:
    """The page and its files need no key; its events do."""
    router = APIRouter(tags=["operation"])
    reader = StateReader(
        gateway.id,
        gateway.members,
        gateway.catalog,
        gateway.streams,
        gateway.requests,
        gateway.meters,
        gateway.traces,
        gateway.settings,
    )
    pages = ConsolePages(reader, gateway.settings, gateway.draining)

    @router.get("/", include_in_schema=False)
    async def root(request: Request) -> Response:
        """A browser that was given the bare address finds the console."""
        return RedirectResponse(f"{request.scope.get('root_path', '')}/console", status_code=307)

    @router.get("/console", include_in_schema=False)
    async def console(request: Request) -> Response:
        return asset_response(PAGE, request)

    @router.get("/console/events", include_in_schema=False)
    async def events(request: Request, limit: _Limit = None) -> Response:
        """Follow models, running requests and, with an admin key, the mesh: server-sent events.

        A message is sent when something has changed, at most one per `console_interval_s`. A key
        sees its tenant's requests. The stream ends after five minutes; connect again.
        """
        is_foreign = request.headers.get("sec-fetch-site") == "cross-site"
        if is_foreign and not gateway.settings.cors_origins:
            raise Forbidden("a page of another site cannot follow the mesh")
        access = context_of(request.scope).access
        return PageResponse(partial(pages.messages, access, limit), gateway.settings)

    @router.get("/console/{name}", include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        return asset_response(name, request)

    return router
