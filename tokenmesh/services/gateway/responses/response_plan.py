"""From a request, or the first record of one, to all that a run needs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from tokenmesh.services.gateway.openai.intake import Intake
from tokenmesh.services.gateway.responses.draft import PreparedResponse, draft
from tokenmesh.services.gateway.responses.event_log import Log
from tokenmesh.services.gateway.responses.mcp_offer import Listings
from tokenmesh.services.gateway.responses.mcp_requested import RequestedServer, read_servers
from tokenmesh.services.gateway.responses.mcp_servers import McpServers
from tokenmesh.services.gateway.responses.records import ToolsListed
from tokenmesh.services.gateway.responses.response_spec import ResponseSpec
from tokenmesh.services.gateway.responses.tool_calls import ToolCalls
from tokenmesh.shared.config.responses import ResponseSettings


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """A response that can be begun or continued."""

    order: ResponseSpec
    first: PreparedResponse
    tools: ToolCalls


class Planner:
    """Plans for one gateway."""

    def __init__(self, intake: Intake, asker: McpServers, settings: ResponseSettings) -> None:
        self._intake = intake
        self._asker = asker
        self._settings = settings

    async def plan(self, order: ResponseSpec, log: Log | None = None) -> ResponsePlan:
        """Ask MCP servers what they offer, unless the log knows. Raises what is wrong with it."""
        body = order.body
        tools = body.tools or ()
        servers = read_servers(tools, self._settings.mcp_servers)
        listings = await self._listings(servers, log)
        limit = self._settings.max_tool_calls
        if body.max_tool_calls is not None:
            limit = min(limit, body.max_tool_calls)
        calls = ToolCalls(self._asker, servers, listings, tools, limit)
        first = await draft(
            self._intake,
            body,
            order.exchange,
            order.id,
            previous=order.previous,
            served=calls.served,
            created_s=order.created_s,
        )
        if order.seed is None:
            order = replace(order, seed=first.ask.jobs[0].sampling.seed)
        return ResponsePlan(order, first, calls)

    async def _listings(self, servers: Sequence[RequestedServer], log: Log | None) -> Listings:
        records = log.records if log is not None else []
        listings: dict[str, list[dict[str, Any]]] = {
            each.place: msgspec.json.decode(each.tools)
            for each in records
            if isinstance(each, ToolsListed)
        }
        for server in servers:
            if server.place not in listings:
                listings[server.place] = await self._asker.list_tools(server)
        return listings
