"""Offer: the tools of MCP servers that a response may use, under names that the model can say."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tokenmesh.services.gateway.responses.mcp_requested import RequestedServer
from tokenmesh.services.gateway.responses.tools import ServerTool

Listings = Mapping[str, Sequence[dict[str, Any]]]
"""By the place of a server in the request: its tools as OpenAI shows them."""

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_-]")
_MAX_NAME_CHARS: Final = 64


def offer(
    servers: Sequence[RequestedServer], listings: Listings, tools: Sequence[dict[str, Any]]
) -> dict[str, list[ServerTool]]:
    """By place: what the model is offered. A name that is taken gets the server's in front."""
    taken = {each.get("name") for each in tools if each.get("type") != "mcp"}
    offered: dict[str, list[ServerTool]] = {}
    for server in servers:
        offered[server.place] = found = []
        for tool in listings[server.place]:
            name = _UNSAFE.sub("_", tool["name"])[:_MAX_NAME_CHARS]
            number = 1
            while name in taken:
                number += 1
                name = f"{server.label}_{tool['name']}_{number}"
                name = _UNSAFE.sub("_", name)[-_MAX_NAME_CHARS:]
            taken.add(name)
            found.append(_server_tool(server, tool, name))
    return offered


def _server_tool(server: RequestedServer, tool: Mapping[str, Any], name: str) -> ServerTool:
    return ServerTool(
        server_label=server.label,
        name=tool["name"],
        function_name=name,
        description=tool["description"],
        parameters=tool["input_schema"],
    )
