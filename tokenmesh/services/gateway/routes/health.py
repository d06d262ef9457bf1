"""GET /health, /livez, /readyz, /metrics, /load, /version, /mesh; POST /mesh/{id}/drain."""

from typing import Final

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

import tokenmesh
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.http.sse import json_response
from tokenmesh.services.gateway.tenancy.auth import require_admin

_NEEDED: Final[tuple[str, ...]] = ("tokenizer", "scheduler", "worker")
_RENDER_NEEDED: Final = ("tokenizer",)
_TOKENS_NEEDED: Final = ("scheduler", "worker")


def health_router(gateway: Gateway) -> APIRouter:
    """State of this process; every gateway serves it."""
    router = APIRouter(tags=["operation"])

    @router.get("/livez")
    async def livez() -> Response:
        """200 while the process responds."""
        return Response()

    @router.get("/health")
    async def health() -> Response:
        """200 while requests can be served; vLLM's name for /readyz."""
        return readiness(gateway)

    @router.get("/readyz")
    async def readyz() -> Response:
        """200 while a tokenizer, a scheduler and a worker are alive; else 503 and why.

        A worker that sleeps counts only if its model is on demand.

        With --render-only a tokenizer is enough, with --tokens-only none is needed.
        """
        return readiness(gateway)

    @router.get("/metrics", dependencies=[Depends(require_admin)])
    async def metrics(request: Request) -> Response:
        """Metrics of this process and of the mesh's engines for Prometheus."""
        text, media_type = await gateway.render_metrics(request.headers.get("accept", ""))
        return Response(text, media_type=media_type)

    @router.get("/load")
    async def load() -> Response:
        """The number of open HTTP requests of this gateway, without this one."""
        return json_response({"server_load": gateway.requests.num_open - 1})

    @router.get("/version")
    async def version() -> Response:
        """The version of TokenMesh."""
        return json_response({"version": tokenmesh.__version__})

    return router


def mesh_router(gateway: Gateway) -> APIRouter:
    """State of the mesh, for operators."""
    router = APIRouter(tags=["operation"], dependencies=[Depends(require_admin)])
    view = gateway.mesh_view

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


def readiness(gateway: Gateway) -> Response:
    """200 while requests can be served, else 503 and why."""
    needed, settings = _NEEDED, gateway.settings
    if settings.render_only or settings.tokens_only:
        needed = _RENDER_NEEDED if settings.render_only else _TOKENS_NEEDED
    missing = [service for service in needed if not gateway.members.service(service)]
    if gateway.draining.is_set():
        return json_response({"ready": False, "draining": True}, 503)
    if missing:
        return json_response({"ready": False, "missing": missing}, 503)
    if "worker" in needed and not any(
        member.takes_requests for member in gateway.members.service("worker")
    ):
        return json_response({"ready": False, "asleep": True}, 503)
    return json_response({"ready": True, "gateway": gateway.id})
