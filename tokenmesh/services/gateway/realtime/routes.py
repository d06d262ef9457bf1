"""The websocket /v1/realtime."""

from typing import Final

from fastapi import APIRouter, WebSocket

from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.realtime.sessions import Sessions

PATH: Final = "/v1/realtime"


def realtime_router(gateway: Gateway) -> APIRouter:
    """The route."""
    router = APIRouter()
    sessions = Sessions(gateway)

    @router.websocket(PATH)
    async def realtime(websocket: WebSocket) -> None:
        await sessions.serve(websocket)

    return router
