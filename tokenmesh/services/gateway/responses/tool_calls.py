"""ToolCalls: what a response has to do with MCP servers, each thing once.

A call that was begun by a gateway which is gone is not made again: it may have had an effect. The
model is told that it failed.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from tokenmesh.services.gateway.responses.events import ResponseEvents
from tokenmesh.services.gateway.responses.mcp_offer import Listings, offer
from tokenmesh.services.gateway.responses.mcp_requested import RequestedServer
from tokenmesh.services.gateway.responses.mcp_servers import McpServers
from tokenmesh.services.gateway.responses.records import CallBegun, CallEnded, ToolsListed
from tokenmesh.services.gateway.responses.replay import Replay, encode_frames
from tokenmesh.services.gateway.responses.server_calls import McpCallItem
from tokenmesh.shared.errors import TokenMeshError

_LOST: Final = "the call was begun, and what came of it is not known"


class ToolCalls:
    """Of one response. `max_calls` counts over all its turns."""

    def __init__(
        self,
        asker: McpServers,
        servers: Sequence[RequestedServer],
        listings: Listings,
        tools: Sequence[dict[str, Any]],
        max_calls: int,
    ) -> None:
        self.served = offer(servers, listings, tools)
        """See `read_tools`."""
        self._asker = asker
        self._servers = servers
        self._server_by_label = {each.label: each for each in servers}
        self._listings = listings
        self._calls_left = max_calls

    async def tell_listings(self, steps: Replay, events: ResponseEvents) -> None:
        """What the servers have said before the response began."""
        for server in self._servers:
            tools = list(self._listings[server.place])
            listing, told = events.begin_listing(server.label)
            told += events.end_listing(listing, tools)
            recorded = steps.recorded(ToolsListed)
            if recorded is not None:
                steps.retell(recorded, told)
            else:
                listed = ToolsListed(
                    place=server.place,
                    tools=msgspec.json.encode(tools),
                    frames=encode_frames(told),
                )
                await steps.record(listed)

    async def make_calls(self, steps: Replay, events: ResponseEvents) -> None:
        """Make the calls of the turn that has ended, in their order."""
        for call in tuple(events.server_calls):
            is_begun = steps.recorded(CallBegun) is not None
            ended = steps.recorded(CallEnded)
            self._calls_left -= 1
            if ended is not None:
                steps.retell(ended, _tell(events, call, ended))
                continue
            if is_begun:
                ended = CallEnded(item=call.id, error=_LOST)
            else:
                await steps.record(CallBegun(item=call.id))
                # Nobody may come to know of the call's effect before the log knows of the call.
                await steps.settle()
                ended = await self._call(call)
            frames = encode_frames(_tell(events, call, ended))
            await steps.record(msgspec.structs.replace(ended, frames=frames))

    async def _call(self, call: McpCallItem) -> CallEnded:
        if self._calls_left < 0:
            return CallEnded(item=call.id, error="the response has used up max_tool_calls")
        try:
            arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
        except msgspec.DecodeError as error:
            return CallEnded(item=call.id, error=f"the arguments are no JSON object: {error}")
        server = self._server_by_label[call.name.server_label]
        try:
            output = await self._asker.call(server, call.name.name, arguments)
        except TokenMeshError as error:
            return CallEnded(item=call.id, error=error.message)
        return CallEnded(item=call.id, output=output)


def _tell(events: ResponseEvents, call: McpCallItem, ended: CallEnded) -> list[dict[str, Any]]:
    if ended.error is None:
        return events.succeed(call, ended.output or "")
    error = {"type": "mcp_tool_execution_error", "content": ended.error}
    return events.fail_call(call, error)
