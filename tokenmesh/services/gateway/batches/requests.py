"""LineRunner: runs one line of a batch as a request of its tenant, until it has an answer."""

import asyncio
from dataclasses import dataclass, replace
from typing import Final

from starlette.types import Scope

from tokenmesh.services.gateway.batches.lines import LineRequest
from tokenmesh.services.gateway.batches.records import BatchBegun
from tokenmesh.services.gateway.context import RequestContext, attach
from tokenmesh.services.gateway.http.local_call import LocalCalls, LocalResponse
from tokenmesh.services.gateway.tenancy.tenant import Access, Tenant
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.batches import BatchSettings
from tokenmesh.shared.ids import RequestId
from tokenmesh.shared.telemetry import REQUEST_ID, TENANT, span

_WAIT: Final = (429, 503)
"""The mesh is full or not there, or the tenant is over a limit: later it may succeed."""
_AGAIN: Final = (499, 500, 504)
_FIRST_PAUSE_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class LineRunner:
    """All lines of one batch."""

    calls: LocalCalls
    endpoint: str
    access: Access
    settings: BatchSettings
    batch_id: str

    @classmethod
    def of(
        cls, calls: LocalCalls, begun: BatchBegun, tenant: Tenant, settings: BatchSettings
    ) -> "LineRunner":
        """The tenant's requests, behind all others."""
        low = replace(tenant, priority=tenant.priority + settings.priority)
        return cls(calls, begun.endpoint, Access(low), settings, begun.id)

    async def run(self, request: LineRequest, request_id: str) -> LocalResponse:
        """The last response: one that waiting cannot change."""
        failures, pause_s = 0, _FIRST_PAUSE_S
        while True:
            response = await self._post(request, request_id)
            if response.status in _AGAIN:
                failures += 1
            if response.status not in (*_WAIT, *_AGAIN) or failures >= self.settings.attempts:
                return response
            wanted_s = max(pause_s, response.retry_after_s or 0.0)
            await asyncio.sleep(min(wanted_s, self.settings.retry_max_s))
            pause_s = min(2 * pause_s, self.settings.retry_max_s)

    async def _post(self, request: LineRequest, request_id: str) -> LocalResponse:
        def attach_context(scope: Scope) -> None:
            context = RequestContext(
                RequestId(request_id),
                True,
                monotonic_s(),
                self.access,
                headers=dict(scope["headers"]),
            )
            attach(scope, context)

        attributes: dict[str, str | int] = {
            REQUEST_ID: request_id,
            TENANT: self.access.tenant.name,
            "url.path": self.endpoint,
            "tokenmesh.batch": self.batch_id,
        }
        with span("batch line", attributes) as current:
            response = await self.calls.post(self.endpoint, request.body, attach_context)
            current.set_attribute("http.response.status_code", response.status)
        return response
