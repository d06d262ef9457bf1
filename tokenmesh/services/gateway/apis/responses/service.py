"""Responses: the parts of a gateway that serve the Responses API.

ResponseReader reads, streams, cancels and deletes stored responses, on any gateway. Adopter
continues those of dead gateways.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Final

from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.apis.openai.translation import Json
from tokenmesh.services.gateway.apis.responses.event_log import EventLog
from tokenmesh.services.gateway.apis.responses.items import input_items
from tokenmesh.services.gateway.apis.responses.maker import ResponseMaker, previous_items
from tokenmesh.services.gateway.apis.responses.mcp_servers import McpServers
from tokenmesh.services.gateway.apis.responses.records import ResponseBegun
from tokenmesh.services.gateway.apis.responses.response_logs import ResponseLogs
from tokenmesh.services.gateway.apis.responses.response_plan import Planner, ResponseSpec
from tokenmesh.services.gateway.apis.responses.response_run import RunContext
from tokenmesh.services.gateway.apis.responses.runs import Runs
from tokenmesh.services.gateway.core.api import Background
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.body_budget import SHORT_BYTES
from tokenmesh.services.gateway.core.http.event_loop import off_loop
from tokenmesh.services.gateway.core.mesh.ownership import OrphanWatch
from tokenmesh.services.gateway.core.tenancy.tenant import DEFAULT_TENANT, Access, Tenant
from tokenmesh.shared.bus.base import Bus, Subscription
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import (
    Conflict,
    InvalidInput,
    ProtocolError,
    TokenMeshError,
    Unavailable,
)
from tokenmesh.shared.ids import GatewayId, InstanceId, RequestId, ResponseId
from tokenmesh.shared.subjects import response_cancels
from tokenmesh.shared.telemetry import REQUEST_ID, span

JOURNAL: Final = "responses"
"""Its name among those of a gateway."""
_END_ATTEMPTS: Final = 20
"""An owner that is still alive may append between reading its log and ending it."""


@dataclass(slots=True)
class ResponseReader:
    """Methods raise NotFound for a response that does not exist or that `access` may not see."""

    logs: ResponseLogs
    runs: Runs
    bus: Bus

    async def get(self, response_id: str, access: Access) -> bytes | Json:
        """The Response object, or its JSON once it has ended."""
        ends = await self.logs.ends(response_id, access)
        if ends.ended is not None:
            return ends.ended.response
        return (await self.logs.load(response_id, access)).response()

    async def events(
        self, response_id: str, access: Access, first: int
    ) -> AsyncGenerator[bytes, None]:
        """Frames from number `first` until the end of the response. Must be closed."""
        ends = await self.logs.ends(response_id, access)
        return self.logs.follow(ends.begun.id, first)

    async def input_items(self, response_id: str, access: Access) -> list[Json]:
        ends = await self.logs.ends(response_id, access)
        is_long = len(ends.begun.body) > SHORT_BYTES
        return await off_loop(is_long, input_items, ends.begun)

    async def delete(self, response_id: str, access: Access) -> None:
        """Delete the response and stop generating it."""
        log = await self.logs.load(response_id, access)
        await self.logs.delete(ResponseId(response_id))
        await self._notify_owner(log, ResponseId(response_id))

    async def cancel(self, response_id: str, access: Access) -> bytes | Json:
        """End a background response, unless it has ended. Raises InvalidInput."""
        ends = await self.logs.ends(response_id, access)
        if not ends.begun.is_background:
            raise InvalidInput(
                "Cannot cancel a synchronous response. Only a response created with background "
                "true can be cancelled.",
                param="response_id",
            )
        if ends.ended is None:
            await self._notify_owner(await self.logs.load(response_id, access), ends.begun.id)
            await self._wait_ended(ends.begun.id)
            await self._end(ends.begun.id)
        return await self.get(response_id, access)

    async def _notify_owner(self, log: EventLog, response_id: ResponseId) -> None:
        self.runs.cancel(response_id)
        owner = log.owner
        if log.ended is None and owner is not None and owner != self.runs.owner:
            await self.bus.publish_raw(response_cancels(owner), response_id.encode())

    async def _wait_ended(self, response_id: ResponseId) -> None:
        try:
            async with asyncio.timeout(self.logs.settings.cancel_wait_s):
                async for _ in self.logs.follow(response_id, 0):
                    continue
        except TimeoutError:
            return

    async def _end(self, response_id: ResponseId) -> None:
        """Append the end, unless the owner has done so."""
        for _ in range(_END_ATTEMPTS):
            log = await self.logs.read(response_id)
            if log.ended is not None or log.begun is None:
                return
            try:
                await self.logs.append(response_id, log.cancelled(), log)
            except Conflict:
                continue
            return
        raise Unavailable(f"response {response_id!r} could not be cancelled", retry_after_s=1)


_MESH: Final = Access(DEFAULT_TENANT, is_admin=True)
"""Access to earlier responses was checked when the response began."""


class Adopter:
    """Continues responses whose gateway is dead. `is_alive`: whether a gateway sends heartbeats."""

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
        self._tenant_of = tenant_of
        self.watch = OrphanWatch(
            logs.marks,
            runs.owner,
            self._adopt,
            is_alive=is_alive,
            is_here=self._is_here,
            interval_s=settings.adopt_interval_s,
            what="response",
        )

    def _is_here(self, name: str) -> bool:
        response_id = ResponseId(name)
        return response_id in self._runs or self._runs.is_closing(response_id)

    async def _adopt(self, owner: GatewayId, name: str) -> None:
        response_id = ResponseId(name)
        log = await self._logs.read(response_id)
        begun = log.begun
        has_moved = (
            log.owner is not None and log.owner != owner and self.watch.is_live_peer(log.owner)
        )
        if begun is not None and log.ended is not None:
            await self._runs.close(begun, log.ended, self._tenant_of(begun.tenant))
        if begun is None or log.ended is not None or has_moved:
            await self._logs.marks.remove(owner, response_id)
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
            await self._logs.marks.remove(owner, response_id)

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
        if body.conversation_id is not None:
            found = await self._logs.conversations.get(body.conversation_id, _MESH)
            previous = found.items[: begun.history_items]
        else:
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


_RESPONSE_ID: Final = re.compile(rb"[A-Za-z0-9_-]{1,128}")


class Responses(Background):
    """Without a journal responses are not stored."""

    def __init__(self, core: Core) -> None:
        settings, members, metrics = core.config, core.members, core.metrics
        self.settings = settings.responses
        self._bus = core.bus
        self._members = members
        self._adopt_delay_s = settings.service.missed_beats * settings.service.beat_interval_s
        journal = core.journals.get(JOURNAL)
        logs = ResponseLogs(journal, self.settings, core.redis) if journal is not None else None
        builder = RequestBuilder(core)
        context = RunContext(
            builder=builder,
            services=core.generation,
            conversations=logs.conversations if logs is not None else None,
        )
        self.conversations = context.conversations
        self._runs = Runs(core.id, logs, context, self.settings, metrics)
        planner = Planner(builder, McpServers(self.settings, metrics), self.settings)
        self.maker = ResponseMaker(logs, self._runs, planner, settings.gateway, self.settings)
        self.reader = ResponseReader(logs, self._runs, core.bus) if logs is not None else None
        self._adopter = (
            Adopter(
                self._runs, logs, planner, self.settings, self._is_alive, core.tenancy.keys.tenant
            )
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
            await self._adopter.watch.run(self._adopt_delay_s)

    async def stop(self) -> None:
        """Stop running responses, so that other gateways adopt them."""
        await self._runs.stop()
        if self._subscription is not None:
            await self._subscription.stop()
