"""Routes for operators: health, metrics, the mesh, traces, the console, and the pages of the API.

The pages /docs and /redoc have local scripts and styles.
"""

from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final

import fastapi_offline
from fastapi import APIRouter, Depends, FastAPI, Query
from fastapi import Path as PathValue
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response

import tokenmesh
from tokenmesh.services.gateway.apis.operator.mesh_metrics import MeshMetrics
from tokenmesh.services.gateway.core.context import access_of
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.event_loop import OneByOne, off_loop
from tokenmesh.services.gateway.core.http.sse import JSON, encode_json, json_response
from tokenmesh.services.gateway.core.operations.console.pages import (
    PAGE,
    ConsolePages,
    PageResponse,
    asset_response,
)
from tokenmesh.services.gateway.core.operations.console.state import StateReader
from tokenmesh.services.gateway.core.operations.mesh_view import MeshView
from tokenmesh.services.gateway.core.operations.trace_views import TraceFilter
from tokenmesh.services.gateway.core.operations.traces import TraceStore
from tokenmesh.services.gateway.core.readiness import readiness
from tokenmesh.services.gateway.core.tenancy.auth import require_admin
from tokenmesh.shared.errors import Forbidden, NotFound


def health_router(core: Core, mesh_metrics: MeshMetrics) -> APIRouter:
    """State of this process; every gateway serves it."""
    router = APIRouter(tags=["operation"])

    @router.get("/livez")
    async def livez() -> Response:
        """200 while the process responds."""
        return Response()

    @router.get("/health")
    async def health() -> Response:
        """200 while requests can be served; vLLM's name for /readyz."""
        return readiness(core)

    @router.get("/readyz")
    async def readyz() -> Response:
        """200 while a tokenizer, a scheduler and a worker are alive; else 503 and why.

        A worker that sleeps counts only if its model is on demand. Where every model takes images
        or recordings, an encoder is needed, too.

        With --render-only a tokenizer is enough, with --tokens-only none is needed.
        """
        return readiness(core)

    @router.get("/metrics", dependencies=[Depends(require_admin)])
    async def metrics(request: Request) -> Response:
        """Metrics of this process and of the mesh's engines for Prometheus."""
        text, media_type = await mesh_metrics.render(request.headers.get("accept", ""))
        return Response(text, media_type=media_type)

    @router.get("/load")
    async def load() -> Response:
        """The number of open HTTP requests of this gateway, without this one."""
        return json_response({"server_load": core.requests.num_open - 1})

    @router.get("/version")
    async def version() -> Response:
        """The version of TokenMesh."""
        return json_response({"version": tokenmesh.__version__})

    return router


def mesh_router(core: Core) -> APIRouter:
    """State of the mesh, for operators."""
    router = APIRouter(tags=["operation"], dependencies=[Depends(require_admin)])
    view = MeshView(core.id, core.bus, core.members, core.settings)

    @router.get("/mesh")
    async def mesh() -> Response:
        """Every process: service, version, epoch, models, load, and whether it is draining."""
        return json_response(view.state())

    @router.post("/mesh/{process_id}/drain")
    async def drain(process_id: str) -> Response:
        """Make a process finish or hand over its work and stop; responds when it has begun."""
        await view.drain(process_id)
        return json_response({"id": process_id, "draining": True})

    return router


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
        traces = await store.recent(limit, access_of(request), chosen)
        return json_response({"traces": traces})

    @router.get("/traces/{trace_or_request_id}")
    async def get_trace(
        request: Request,
        trace_or_request_id: Annotated[
            str,
            PathValue(max_length=_MAX_ID_CHARS, description="A trace's id, or a response's `id`."),
        ],
    ) -> Response:
        """Every span of one trace. Spans arrive within half a second after they end."""
        access = access_of(request)
        return json_response(await store.get(trace_or_request_id, access))

    return router


_Limit = Annotated[int | None, Query(ge=1, description="End after so many messages.")]


def console_router(core: Core, traces: TraceStore) -> APIRouter:
    """The page and its files need no key; its events do."""
    router = APIRouter(tags=["operation"])
    reader = StateReader(
        core.id,
        core.members,
        core.mesh.catalog,
        core.mesh.streams,
        core.requests,
        core.generation.meters,
        traces,
        core.settings,
    )
    pages = ConsolePages(reader, core.settings, core.draining)

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
        if is_foreign and not core.settings.cors_origins:
            raise Forbidden("a page of another site cannot follow the mesh")
        access = access_of(request)
        return PageResponse(partial(pages.messages, access, limit), core.settings)

    @router.get("/console/{name}", include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        return asset_response(name, request)

    return router


def _document_of(app: FastAPI) -> bytes:
    document = encode_json(app.openapi())
    app.openapi_schema = None  # its bytes are kept
    return document


_STATIC: Final = Path(str(files(fastapi_offline))) / "static"
_NAMES: Final = frozenset(file.name for file in _STATIC.iterdir())


def docs_router(core: Core) -> APIRouter:
    """The two pages and the files that they load."""
    router = APIRouter(include_in_schema=False)
    root = core.settings.root_path
    title, document, folder = "TokenMesh", f"{root}/openapi.json", f"{root}/docs"
    made: list[bytes] = []
    making = OneByOne()

    @router.get("/openapi.json")
    async def openapi(request: Request) -> Response:
        """Made with the first request for it, in a thread: that takes some hundred ms."""
        async with making.turn():
            if not made:
                made.append(await off_loop(True, _document_of, request.app))
        return Response(made[0], media_type=JSON)

    @router.get("/docs")
    async def swagger() -> HTMLResponse:
        return get_swagger_ui_html(
            title=title,
            openapi_url=document,
            swagger_js_url=f"{folder}/swagger-ui-bundle.js",
            swagger_css_url=f"{folder}/swagger-ui.css",
            swagger_favicon_url=f"{folder}/favicon.png",
        )

    @router.get("/redoc")
    async def redoc() -> HTMLResponse:
        return get_redoc_html(
            title=title,
            openapi_url=document,
            redoc_js_url=f"{folder}/redoc.standalone.js",
            redoc_favicon_url=f"{folder}/favicon.png",
            with_google_fonts=False,
        )

    @router.get("/docs/{name}")
    async def file(name: str) -> FileResponse:
        if name not in _NAMES:
            raise NotFound(f"no file {name[:80]!r}")
        return FileResponse(_STATIC / name)

    return router
