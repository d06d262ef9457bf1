"""The websocket /v1/realtime: which sessions may open, how many, and their metrics."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Final

from fastapi import APIRouter, WebSocket
from starlette.datastructures import Headers

from tokenmesh.services.gateway.apis.realtime.events import Channel
from tokenmesh.services.gateway.apis.realtime.services import RealtimeServices
from tokenmesh.services.gateway.apis.realtime.session import RESTARTS, RealtimeSession
from tokenmesh.services.gateway.apis.realtime.session_config import SessionConfig
from tokenmesh.services.gateway.core.context import access_of
from tokenmesh.services.gateway.core.errors import error_response
from tokenmesh.services.gateway.core.tenancy.tenant import Tenant, refusal
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.errors import Draining, Overloaded, TokenMeshError
from tokenmesh.shared.ids import new_request_id
from tokenmesh.shared.telemetry import REQUEST_ID, TENANT, span

PATH: Final = "/v1/realtime"
_PROTOCOL: Final = "realtime"
_RETRY_AFTER_S: Final = 5.0


def realtime_router(services: RealtimeServices) -> APIRouter:
    router = APIRouter()
    sessions = Sessions(services)

    @router.websocket(PATH)
    async def realtime(websocket: WebSocket) -> None:
        await sessions.serve(websocket)

    return router


class Sessions:
    """The realtime sessions of one gateway."""

    def __init__(self, services: RealtimeServices) -> None:
        self._services = services
        self._num_open: Counter[str] = Counter()
        """By tenant."""
        services.core.metrics.gauge_of("websocket_connections_active", self._num_open.total)

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one authorized websocket, from before it is accepted to its end."""
        tenant = access_of(websocket).tenant
        try:
            config = await self._admit(websocket.query_params, tenant)
        except TokenMeshError as error:
            await websocket.send_denial_response(error_response(error, websocket.scope))
            return
        metrics, started_s = self._services.core.metrics, monotonic_s()
        metrics.counter("websocket_connections").inc()
        self._num_open[tenant.name] += 1
        try:
            await self._run(websocket, config)
        finally:
            self._num_open -= Counter([tenant.name])
            lasted_s = monotonic_s() - started_s
            metrics.histogram("websocket_connection_duration_seconds").observe(lasted_s)

    async def _admit(self, query: Mapping[str, str], tenant: Tenant) -> SessionConfig:
        """Raises Overloaded, Draining, UnknownModel."""
        services, model = self._services, query.get("model")
        card = await services.core.mesh.catalog.find_soon(model)
        # No await from here until the session is counted, so that no limit can be exceeded.
        if services.core.draining.is_set():
            raise Draining("this gateway is draining and opens no new sessions")
        limit = services.core.settings.realtime_max_sessions
        if self._num_open.total() >= limit:
            raise Overloaded(
                f"all {limit} realtime sessions are in use", retry_after_s=_RETRY_AFTER_S
            )
        max_sessions = tenant.max_sessions
        if max_sessions is not None and self._num_open[tenant.name] >= max_sessions:
            raise refusal(tenant, "sessions", _RETRY_AFTER_S)
        is_transcription = query.get("intent") == "transcription"
        return SessionConfig(
            model=model or card.name,
            is_transcription=is_transcription,
            names_model=model is not None or "intent" in query,
        )

    async def _run(self, websocket: WebSocket, config: SessionConfig) -> None:
        services, session_id = self._services, new_request_id("sess")
        access = access_of(websocket)
        offered = websocket.scope.get("subprotocols", [])
        headers = [(b"x-request-id", session_id.encode())]
        parent = Headers(scope=websocket.scope).get("traceparent")
        attributes = {
            REQUEST_ID: session_id,
            "tokenmesh.model": config.model,
            TENANT: access.tenant.name,
        }
        with span("realtime_session", attributes, parent=parent):
            protocol = _PROTOCOL if _PROTOCOL in offered else None
            await websocket.accept(protocol, headers)
            channel = Channel(websocket, services.core.settings.write_timeout_s)
            try:
                await RealtimeSession(session_id, config, services, channel, access).run()
            except asyncio.CancelledError:
                # The server stops before the response is done. Nothing awaits this task.
                await channel.close(RESTARTS)
