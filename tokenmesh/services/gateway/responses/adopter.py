"""Adopter: finds responses whose gateway is gone, and goes on with them.

Every gateway looks; the log's fence lets one of them through. A gateway that only stood still wakes
up to a log that is another's, and stops.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.responses.chain import previous_items
from tokenmesh.services.gateway.responses.event_log import Log
from tokenmesh.services.gateway.responses.logs import ResponseLogs, owner_of
from tokenmesh.services.gateway.responses.records import Begun
from tokenmesh.services.gateway.responses.response_plan import Planner
from tokenmesh.services.gateway.responses.response_spec import ResponseSpec
from tokenmesh.services.gateway.responses.runs import Runs
from tokenmesh.services.gateway.tenancy.tenant import DEFAULT_TENANT, Access, Tenant
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import Conflict, TokenMeshError
from tokenmesh.shared.ids import GatewayId, RequestId, ResponseId
from tokenmesh.shared.telemetry import REQUEST_ID, span

logger = logging.getLogger(__name__)

_MESH: Final = Access(DEFAULT_TENANT, is_admin=True)
"""Whoever began the response was allowed to see what it goes on from."""


class Adopter:
    """`is_alive` says whether a gateway beats; it must have had time to hear of all."""

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

    async def run(self, hearing_s: float) -> None:
        """Look for ever; first listen for `hearing_s` who is there."""
        await asyncio.sleep(hearing_s)
        while True:
            try:
                await self.look()
            except TokenMeshError as error:
                logger.debug("cannot look for responses without an owner: %s", error.message)
            await asyncio.sleep(self._settings.adopt_interval_s)

    async def look(self) -> None:
        """Adopt what has no owner now."""
        for owner, response_id in await self._logs.marks():
            is_ours = response_id in self._runs or self._runs.is_closing(response_id)
            if is_ours or self._is_other(owner):
                continue
            try:
                await self._adopt(owner, response_id)
            except Conflict:
                # Another gateway was faster, or it was deleted.
                await self._logs.unmark(self._runs.owner, response_id)
            except TokenMeshError as error:
                # Others may be fine: one log that cannot be read must not stop all of them.
                logger.info("%s has to wait: %s", response_id, error.message)

    async def _adopt(self, owner: GatewayId, response_id: ResponseId) -> None:
        log = await self._logs.read(response_id)
        begun = log.begun
        now_with = owner_of(log)
        has_moved = now_with is not None and now_with != owner and self._is_other(now_with)
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
            await self._go_on(begun, log, reason)
        if owner != self._runs.owner:
            await self._logs.unmark(owner, response_id)

    def _is_other(self, owner: GatewayId) -> bool:
        """Whether it is another gateway that lives."""
        return owner != self._runs.owner and self._is_alive(owner)

    async def _go_on(self, begun: Begun, log: Log, reason: str) -> None:
        try:
            order = await self._order(begun)
            plan = await self._planner.plan(order, log)
            await self._runs.adopt(plan, log, reason)
        except Conflict:
            raise
        except TokenMeshError as error:
            # The model may come back; another gateway may know more.
            if error.retryable or (error.status == 404 and now_s() < begun.deadline_s):
                raise
            await self._runs.give_up(begun.id, error)

    async def _order(self, begun: Begun) -> ResponseSpec:
        # The name may stand for several models by now.
        body = begun.request().model_copy(update={"model": begun.model})
        previous = await previous_items(self._logs, body.previous_response_id, _MESH)
        access = Access(self._tenant_of(begun.tenant))
        return ResponseSpec(
            id=begun.id,
            body=body,
            body_json=begun.body,
            created_s=begun.created_s,
            deadline_s=begun.deadline_s,
            exchange=RequestContext(RequestId(begun.id), True, monotonic_s(), access),
            previous=previous,
            seed=begun.seed,
        )
