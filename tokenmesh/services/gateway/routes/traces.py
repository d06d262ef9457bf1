"""GET /traces and /traces/{id}."""

from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.operations.trace_views import TraceFilter
from tokenmesh.services.gateway.operations.traces import TraceStore

_JSON: Final = "application/json"
_MAX_LISTED: Final = 500
_MAX_ID_CHARS: Final = 256
_MAX_SECONDS: Final = 1e11

_Status = Annotated[
    str | None,
    Query(
        pattern="^(ok|failed|[1-5][0-9]{2})$",
        description="`ok`; `failed`: an error in a span, or an HTTP status from 400; or one HTTP "
        "status.",
    ),
]
_Name = Annotated[str | None, Query(max_length=_MAX_ID_CHARS, description="Its exact name.")]
_Seconds = Annotated[
    float | None, Query(ge=0, le=_MAX_SECONDS, description="Unix time of the trace's beginning.")
]


def traces_router(store: TraceStore) -> APIRouter:
    """The routes; a key sees the traces of its own tenant."""
    router = APIRouter(tags=["traces"])

    @router.get("/traces")
    async def list_traces(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=_MAX_LISTED, description="Traces at most.")] = 50,
        status: _Status = None,
        model: _Name = None,
        tenant: _Name = None,
        since_s: _Seconds = None,
        until_s: _Seconds = None,
        min_ms: Annotated[
            float, Query(ge=0, le=_MAX_SECONDS * 1e3, description="Shortest duration.")
        ] = 0.0,
        requests_only: Annotated[
            bool, Query(description="Leave out traces that belong to no request.")
        ] = False,
    ) -> Response:
        """The latest traces that this gateway has seen, newest first; a key's own tenant's."""
        chosen = TraceFilter(
            status=status,
            model=model,
            tenant=tenant,
            since_ns=None if since_s is None else round(since_s * 1e9),
            until_ns=None if until_s is None else round(until_s * 1e9),
            min_ns=round(min_ms * 1e6),
            requests_only=requests_only,
        )
        traces = await store.recent(limit, context_of(request.scope).access, chosen)
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

    return router
