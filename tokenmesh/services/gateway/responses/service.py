"""Responses: the parts of a gateway that serve the Responses API."""

import re
from collections.abc import Callable
from typing import Final

from tokenmesh.services.gateway.generation.usage import Meters
from tokenmesh.services.gateway.mesh.pipeline import Pipeline
from tokenmesh.services.gateway.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.responses.adopter import Adopter
from tokenmesh.services.gateway.responses.maker import ResponseMaker
from tokenmesh.services.gateway.responses.mcp_servers import McpServers
from tokenmesh.services.gateway.responses.reader import ResponseReader
from tokenmesh.services.gateway.responses.response_logs import ResponseLogs
from tokenmesh.services.gateway.responses.response_plan import Planner
from tokenmesh.services.gateway.responses.response_run import RunContext
from tokenmesh.services.gateway.responses.runs import Runs
from tokenmesh.services.gateway.tenancy.admission import Admission
from tokenmesh.services.gateway.tenancy.tenant import Tenant
from tokenmesh.shared.bus.base import Bus, Subscription
from tokenmesh.shared.config import Settings
from tokenmesh.shared.errors import ProtocolError
from tokenmesh.shared.ids import GatewayId, InstanceId, ResponseId
from tokenmesh.shared.journal import Journal
from tokenmesh.shared.membership import Members
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.subjects import response_cancels

_RESPONSE_ID: Final = re.compile(rb"[A-Za-z0-9_-]{1,128}")


class Responses:
    """`journal` None: responses are not stored."""

    def __init__(
        self,
        gateway_id: GatewayId,
        bus: Bus,
        journal: Journal | None,
        members: Members,
        settings: Settings,
        *,
        builder: RequestBuilder,
        pipeline: Pipeline,
        admission: Admission,
        tenant_of: Callable[[str], Tenant],
        meters: Meters,
        metrics: Metrics,
    ) -> None:
        self.settings = settings.responses
        self._bus = bus
        self._members = members
        self._adopt_delay_s = settings.service.missed_beats * settings.service.beat_interval_s
        logs = ResponseLogs(journal, self.settings) if journal is not None else None
        context = RunContext(
            builder=builder,
            pipeline=pipeline,
            max_buffered_tokens=settings.gateway.max_buffered_tokens,
            admission=admission,
        )
        self._runs = Runs(gateway_id, logs, context, self.settings, meters, metrics)
        planner = Planner(builder, McpServers(self.settings, metrics), self.settings)
        self.maker = ResponseMaker(logs, self._runs, planner, settings.gateway, self.settings)
        self.reader = ResponseReader(logs, self._runs, bus) if logs is not None else None
        self._adopter = (
            Adopter(self._runs, logs, planner, self.settings, self._is_alive, tenant_of)
            if logs is not None
            else None
        )
        self._subscription: Subscription | None = None

    def _is_alive(self, gateway_id: GatewayId) -> bool:
        return self._members.get(InstanceId(gateway_id)) is not None

    async def start(self) -> None:
        subject = response_cancels(self._runs.owner)
        self._subscription = await self._bus.subscribe_raw(subject, self._on_cancel)

    async def _on_cancel(self, _subject: str, data: bytes) -> None:
        if not _RESPONSE_ID.fullmatch(data):
            raise ProtocolError("not the id of a response")
        self._runs.cancel(ResponseId(data.decode("ascii")))

    async def run(self) -> None:
        """Adopt responses of dead gateways, until cancelled."""
        if self._adopter is not None:
            await self._adopter.run(self._adopt_delay_s)

    async def stop(self) -> None:
        """Stop running responses, so that other gateways adopt them."""
        await self._runs.stop()
        if self._subscription is not None:
            await self._subscription.stop()
