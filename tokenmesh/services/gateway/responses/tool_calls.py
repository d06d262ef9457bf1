"""ToolCalls: MCP listings and calls of a response, each recorded in its log.

A call that a dead gateway had begun is not repeated, because it may have had an effect: the model
sees it as failed.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from tokenmesh.services.gateway.openai.translation import Json
from tokenmesh.services.gateway.responses.event_log import Replay, encode_frames
from tokenmesh.services.gateway.responses.events import ResponseEvents
from tokenmesh.services.gateway.responses.mcp_servers import McpServers, RequestedServer
from tokenmesh.services.gateway.responses.output_items import Event, McpCallItem
from tokenmesh.services.gateway.responses.records import CallBegun, CallEnded, ToolsListed
from tokenmesh.services.gateway.responses.tools import Listings, server_tools
from tokenmesh.shared.errors import TokenMeshError

_LOST: Final = "the call was begun, and its result is not known"


class ToolCalls:
    """MCP calls of one response. `max_calls` limits all turns together."""

    def __init__(
        self,
        mcp_servers: McpServers,
        requested: Sequence[RequestedServer],
        listings: Listings,
        tools: Sequence[Json],
        max_calls: int,
    ) -> None:
        self.served = server_tools(requested, listings, tools)
        self._mcp_servers = mcp_servers
        self._requested = {each.label: each for each in requested}
        self._listings = listings
        self._calls_left = max_calls

    async def emit_listings(self, replay: Replay, events: ResponseEvents) -> None:
        """Add an item with the tools of each server."""
        for server in self._requested.values():
            tools = list(self._listings[server.place])
            emitted = events.list_tools(server.label, tools)
            recorded = replay.next(ToolsListed)
            if recorded is not None:
                replay.check(recorded, emitted)
            else:
                data, frames = msgspec.json.encode(tools), encode_frames(emitted)
                await replay.record(ToolsListed(place=server.place, tools=data, frames=frames))

    async def make_calls(self, replay: Replay, events: ResponseEvents) -> None:
        """Make the calls of the last turn in order."""
        for call in tuple(events.server_calls):
            is_begun = replay.next(CallBegun) is not None
            ended = replay.next(CallEnded)
            self._calls_left -= 1
            if ended is not None:
                replay.check(ended, _emit(events, call, ended))
                continue
            if is_begun:
                ended = CallEnded(item=call.id, error=_LOST)
            else:
                await replay.record(CallBegun(item=call.id))
                # The log must have the call before it can have an effect.
                await replay.settle()
                ended = await self._call(call)
            frames = encode_frames(_emit(events, call, ended))
            await replay.record(msgspec.structs.replace(ended, frames=frames))

    async def _call(self, call: McpCallItem) -> CallEnded:
        if self._calls_left < 0:
            return CallEnded(item=call.id, error="max_tool_calls of the response is exceeded")
        try:
            arguments = msgspec.json.decode(call.arguments or "{}", type=Json)
        except msgspec.DecodeError as error:
            return CallEnded(item=call.id, error=f"the arguments are not a JSON object: {error}")
        server = self._requested[call.name.server_label]
        try:
            output = await self._mcp_servers.call(server, call.name.name, arguments)
        except TokenMeshError as error:
            return CallEnded(item=call.id, error=error.message)
        return CallEnded(item=call.id, output=output)


def _emit(events: ResponseEvents, call: McpCallItem, ended: CallEnded) -> list[Event]:
    if ended.error is None:
        return events.succeed(call, ended.output or "")
    error = {"type": "mcp_tool_execution_error", "content": ended.error}
    return events.fail_call(call, error)
