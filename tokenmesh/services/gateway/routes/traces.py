"""GET /traces, /traces/{id} and /console."""

from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response
from starlette.responses import RedirectResponse

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.operations.console import HEADERS, PAGE
from tokenmesh.services.gateway.operations.traces import TraceStore

_JSON: Final = "application/json"
_MAX_LISTED: Final = 500
_MAX_ID_CHARS: Final = 256


def traces_router(store: TraceStore) -> APIRouter:
    """The routes. `/console` holds no data; it prompts for a key when `/traces` answers 401."""
    router = APIRouter(tags=["traces"])

    @router.get("/traces")
    async def list_traces(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=_MAX_LISTED, description="Traces at most.")] = 50,
    ) -> Response:
        """The latest traces that this gateway has seen, newest first; a key's own tenant's."""
        traces = await store.recent(limit, context_of(request.scope).access)
        return Response(msgspec.json.encode({"traces": traces}), media_type=_JSON)

    @router.get("/traces/{trace_or_request_id}")
    async def get_trace(
        request: Request,
        trace_or_request_id: Annotated[
            str, Path(max_length=_MAX_ID_CHARS, description="A trace's id, or a response's `id`.")
        ],
    ) -> Response:
        """Every span of one trace. Spans arrive within half a second after they end."""
        trace = await store.get(trace_or_request_id, context_of(request.scope).access)
        return Response(msgspec.json.encode(trace), media_type=_JSON)

    @router.get("/", include_in_schema=False)
    async def root(request: Request) -> Response:
        """A browser that was given the bare address finds the console."""
        return RedirectResponse(f"{request.scope.get('root_path', '')}/console", status_code=307)

    @router.get("/console", include_in_schema=False)
    async def console() -> Response:
        """The page that shows both."""
        return Response(PAGE, media_type="text/html; charset=utf-8", headers=HEADERS)

    return router
