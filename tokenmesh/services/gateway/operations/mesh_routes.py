"""GET /mesh: who is there and how busy. POST /mesh/{id}/drain: one process leaves."""

from fastapi import APIRouter, Depends
from starlette.responses import Response

from tokenmesh.services.gateway.errors import json_response
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.tenancy.auth import require_admin


def mesh_router(gateway: Gateway) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["operation"], dependencies=[Depends(require_admin)])
    view = gateway.mesh_view

    @router.get("/mesh")
    async def mesh() -> Response:
        """Every process: service, version, epoch, models, load, whether it drains."""
        return json_response(view.state())

    @router.post("/mesh/{process_id}/drain")
    async def drain(process_id: str) -> Response:
        """Let a process finish or hand over what it has and leave; answered when it has begun."""
        await view.drain(process_id)
        return json_response({"id": process_id, "draining": True})

    return router
