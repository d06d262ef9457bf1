"""Adopter: finds responses whose gateway is dead, and continues them.

Every gateway looks for them; the fence of the log admits one. A gateway that was only suspended
gets a Conflict at its next append, and stops.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.responses.event_log import EventLog
from tokenmesh.services.gateway.responses.records import ResponseBegun
from tokenmesh.services.gateway.responses.references import previous_items
from tokenmesh.services.gateway.responses.response_logs import ResponseLogs
from tokenmesh.services.gateway.responses.response_plan import Planner, ResponseSpec
from tokenmesh.services.gateway.responses.runs import Runs
from tokenmesh.services.gateway.tenancy.tenant import DEFAULT_TENANT, Access, Tenant
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import Conflict, TokenMeshError
from tokenmesh.shared.ids import GatewayId, RequestId, ResponseId
from tokenmesh.shared.telemetry import REQUEST_ID, span

logger = logging.getLogger(__name__)

_MESH: Final = Access(DEFAULT_TENANT, is_admin=True)
"""Access to earlier responses was checked when the response began."""


class Adopter:
    """`is_alive`: whether a gateway sends heartbeats."""

    def __init__(
        self,
        runs: Runs,
        logs: ResponseLogs,
        planner: Planner,
        settings: ResponseSettings,
        is_alive: Callable[[GatewayId], bool],
        tenant_of: Callable[[str], Tenant],
    ) -> None:
        self._runs = runs
        self._logs = logs
        self._planner = planner
        self._settings = settings
        self._is_alive = is_alive
        self._tenant_of = tenant_of

    async def run(self, delay_s: float) -> None:
        """Look again and again, until cancelled. In `delay_s` all live gateways must be heard."""
        await asyncio.sleep(delay_s)
        while True:
            try:
                await self.look()
            except TokenMeshError as error:
                logger.debug("cannot look for orphaned responses: %s", error.message)
            await asyncio.sleep(self._settings.adopt_interval_s)

    async def look(self) -> None:
        """Adopt responses that no live gateway generates."""
        for owner, response_id in await self._logs.marks():
            is_ours = response_id in self._runs or self._runs.is_closing(response_id)
            if is_ours or self._is_live_peer(owner):
                continue
            try:
                await self._adopt(owner, response_id)
            except Conflict:
                # Another gateway has adopted it, or it was deleted.
                await self._logs.unmark(self._runs.owner, response_id)
            except TokenMeshError as error:
                # One log that cannot be read must not stop the adoption of others.
                logger.info("cannot adopt response %s yet: %s", response_id, error.message)

    async def _adopt(self, owner: GatewayId, response_id: ResponseId) -> None:
        log = await self._logs.read(response_id)
        begun = log.begun
        has_moved = log.owner is not None and log.owner != owner and self._is_live_peer(log.owner)
        if begun is not None and log.ended is not None:
            await self._runs.close(begun, log.ended, self._tenant_of(begun.tenant))
        if begun is None or log.ended is not None or has_moved:
            await self._logs.unmark(owner, response_id)
            return
        reason = "gateway gone" if owner != self._runs.owner else "run broken off"
        attributes: dict[str, str | int] = {
            REQUEST_ID: response_id,
            "tokenmesh.reason": reason,
            "tokenmesh.owner": owner,
            "tokenmesh.records": len(log.records),
        }
        with span("adopt", attributes):
            await self._continue(begun, log, reason)
        if owner != self._runs.owner:
            await self._logs.unmark(owner, response_id)

    def _is_live_peer(self, owner: GatewayId) -> bool:
        """Whether it is another gateway, and alive."""
        return owner != self._runs.owner and self._is_alive(owner)

    async def _continue(self, begun: ResponseBegun, log: EventLog, reason: str) -> None:
        try:
            plan = await self._planner.plan(await self._spec(begun), log)
            await self._runs.adopt(plan, log, reason)
        except Conflict:
            raise
        except TokenMeshError as error:
            # Worth another attempt: the model may come back.
            if error.retryable or (error.status == 404 and now_s() < begun.deadline_s):
                raise
            await self._runs.give_up(begun.id, error)

    async def _spec(self, begun: ResponseBegun) -> ResponseSpec:
        # Its model name may be an alias that now means another model.
        body = begun.request().model_copy(update={"model": begun.model})
        previous = await previous_items(self._logs, body.previous_response_id, _MESH)
        access = Access(self._tenant_of(begun.tenant))
        return ResponseSpec(
            id=begun.id,
            body=body,
            body_json=begun.body,
            created_s=begun.created_s,
            deadline_s=begun.deadline_s,
            context=RequestContext(RequestId(begun.id), True, monotonic_s(), access),
            previous=previous,
            seed=begun.seed,
        )
