"""Function names of MCP tools: valid and unique."""

from typing import Any

from tokenmesh.services.gateway.apis.responses.mcp_servers import RequestedServer
from tokenmesh.services.gateway.apis.responses.tools import server_tools
from tokenmesh.shared.config.responses import McpServerSettings


def server(label: str, number: int, **settings: Any) -> RequestedServer:
    own = McpServerSettings(url="http://x", **settings)
    return RequestedServer(place=f"tools[{number}]", label=label, settings=own, allowed=None)


def listing(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "description": None, "input_schema": {}} for name in names]


def test_names_are_the_servers_own_where_they_can_be() -> None:
    servers = [server("docs", 1), server("web", 2)]
    listings = {"tools[1]": listing("find", "read.page"), "tools[2]": listing("find", "x" * 90)}
    own = [{"type": "function", "name": "read_page"}, {"type": "mcp"}, {"type": "mcp"}]
    offered = server_tools(servers, listings, own)
    names = [each.function_name for found in offered.values() for each in found]
    assert names[:3] == ["find", "docs_read_page_2", "web_find_2"]
    assert len(set(names)) == 4
    assert all(len(name) <= 64 for name in names)
    found = offered["tools[2]"]
    assert [(each.server_label, each.name) for each in found] == [
        ("web", "find"),
        ("web", "x" * 90),
    ]


def test_the_operator_and_the_request_both_have_to_allow_a_tool() -> None:
    by_both = RequestedServer(
        place="tools[0]",
        label="docs",
        settings=McpServerSettings(url="http://x", allowed_tools=("find", "read")),
        allowed=frozenset(("find", "delete")),
    )
    assert [name for name in ("find", "read", "delete") if by_both.allows(name)] == ["find"]
    assert server("docs", 0).allows("anything")
