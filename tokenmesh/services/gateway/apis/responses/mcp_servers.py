"""McpServers: lists and calls tools of MCP servers. The only file that imports their SDK.

The operator configures the servers, a request only names them. Each operation is an MCP session of
its own, because another gateway may continue the response.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tokenmesh.services.gateway.apis.openai.translation import Json
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid
from tokenmesh.shared.config.responses import McpServerSettings, ResponseSettings
from tokenmesh.shared.errors import PayloadTooLarge, TokenMeshError, Unavailable
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.telemetry import span

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import ContentBlock
    from mcp.types import Tool as McpTool

MAX_MCP_CALLS_RUNNING: Final = 64
"""Requests of one gateway to MCP servers at a time."""
MAX_MCP_TOOLS: Final = 128
"""Tools of one MCP server that a request may be offered."""

_REFUSED: Final = ("connector_id", "authorization", "headers")
_MAX_REASON_CHARS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedServer:
    """One `mcp` tool of a request."""

    place: str
    """Its path in the request."""
    label: str
    settings: McpServerSettings
    allowed: frozenset[str] | None
    """Names of allowed tools; None: all tools of the server."""

    def allows(self, name: str) -> bool:
        """Return whether both the operator and the request allow the tool."""
        by_operator = self.settings.allowed_tools
        is_wanted = self.allowed is None or name in self.allowed
        return is_wanted and (by_operator is None or name in by_operator)


def read_servers(
    tools: Sequence[Json], servers: Mapping[str, McpServerSettings]
) -> list[RequestedServer]:
    """The MCP servers of a request. Raises InvalidInput for unknown servers and options."""
    found: dict[str, RequestedServer] = {}
    for index, tool in enumerate(tools):
        if tool.get("type") != "mcp":
            continue
        path = f"tools[{index}]"
        label = tool.get("server_label")
        settings = servers.get(label) if isinstance(label, str) else None
        if not isinstance(label, str) or settings is None:
            known = ", ".join(sorted(servers)) or "none"
            problem = f"{str(label)[:80]!r} is not a configured MCP server; configured: {known}"
            raise invalid(f"{path}.server_label", problem)
        if label in found:
            raise invalid(f"{path}.server_label", f"{label!r} appears twice")
        _check(tool, settings, path)
        allowed = _allowed(tool.get("allowed_tools"), f"{path}.allowed_tools")
        found[label] = RequestedServer(place=path, label=label, settings=settings, allowed=allowed)
    return list(found.values())


def _check(tool: Json, settings: McpServerSettings, path: str) -> None:
    for name in _REFUSED:
        if tool.get(name) is not None:
            problem = "is not supported: the operator configures MCP servers"
            raise invalid(f"{path}.{name}", problem, NotSupported)
    if tool.get("server_url") not in (None, settings.url):
        raise invalid(f"{path}.server_url", "differs from the configured URL; leave it out")
    if tool.get("require_approval") != "never":
        problem = "must be 'never': approval of single calls is not supported"
        raise invalid(f"{path}.require_approval", problem, NotSupported)


def _allowed(value: object, path: str) -> frozenset[str] | None:
    if isinstance(value, dict):
        if unknown := sorted(set(value) - {"tool_names"}):
            problem = "is not supported: list the tools by name"
            raise invalid(f"{path}.{unknown[0]}", problem, NotSupported)
        value = value.get("tool_names")
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise invalid(path, "must be a list of names")
    return frozenset(value)


class McpServers:
    """Connections to the MCP servers, with limits on number, time and sizes."""

    def __init__(self, settings: ResponseSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._running = asyncio.Semaphore(MAX_MCP_CALLS_RUNNING)

    async def list_tools(self, server: RequestedServer) -> list[Json]:
        """The allowed tools, in OpenAI's shape. Raises Unavailable, PayloadTooLarge."""
        tools: list[Json] = []
        with span("mcp_list_tools", {"tokenmesh.mcp_server": server.label}):
            async with self._connect(server) as client:
                cursor: str | None = None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    tools.extend(_shape(each) for each in page.tools if server.allows(each.name))
                    cursor = page.next_cursor
                    if cursor is None or len(tools) > MAX_MCP_TOOLS:
                        break
        if len(tools) > MAX_MCP_TOOLS:
            limit = MAX_MCP_TOOLS
            raise PayloadTooLarge(
                f"MCP server {server.label} has more than {limit} tools: choose with allowed_tools",
                param=f"{server.place}.allowed_tools",
            )
        return tools

    async def call(self, server: RequestedServer, name: str, arguments: Mapping[str, Any]) -> str:
        """The result of a tool as text. Raises ToolFailed, Unavailable."""
        attributes = {"tokenmesh.mcp_server": server.label, "tokenmesh.mcp_tool": name}
        with span("mcp_call", attributes):
            async with self._connect(server) as client:
                result = await client.call_tool(name, dict(arguments))
        text = _text_of(result.content)
        limit = self._settings.max_mcp_result_bytes
        if len(text.encode()) > limit:
            raise ToolFailed(
                f"the result is over the limit of {limit} bytes (responses.max_mcp_result_bytes)"
            )
        if result.is_error:
            raise ToolFailed(text)
        return text

    @asynccontextmanager
    async def _connect(self, server: RequestedServer) -> "AsyncIterator[Client]":
        """An MCP session. Raises Unavailable when the server cannot be reached or refuses."""
        # Importing the SDK takes a second, which only gateways with MCP servers spend.
        import httpx2
        from mcp import Client, MCPError
        from mcp.client.streamable_http import streamable_http_client

        timeout_s = self._settings.mcp_timeout_s
        secrets = server.settings.headers
        headers = {name: value.get_secret_value() for name, value in secrets.items()}
        outcome = "failed"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._running,
                httpx2.AsyncClient(headers=headers, timeout=timeout_s) as http,
                Client(streamable_http_client(server.settings.url, http_client=http)) as client,
            ):
                yield client
            outcome = "answered"
        except TimeoutError as error:
            reason = f"MCP server {server.label} did not answer within {timeout_s:g} s"
            raise Unavailable(reason, param=server.place) from error
        except (MCPError, httpx2.HTTPError, OSError) as error:
            raise _unavailable(server, error) from error
        except ExceptionGroup as group:
            # Errors of the SDK's tasks.
            raise _unavailable(server, group) from group
        finally:
            self._metrics.counter("mcp_questions", server=server.label, outcome=outcome).inc()


class ToolFailed(TokenMeshError):
    """The tool reported a failure; the model sees its message."""

    code = "tool_failed"


def _shape(tool: "McpTool") -> Json:
    annotations = tool.annotations
    return {
        "name": tool.name,
        "description": tool.description,
        "input_schema": tool.input_schema,
        "annotations": annotations.model_dump(exclude_none=True) if annotations else None,
    }


def _text_of(content: "Sequence[ContentBlock]") -> str:
    """Text blocks as text, other blocks as JSON."""
    from mcp.types import TextContent

    parts = []
    for block in content:
        if isinstance(block, TextContent):
            parts.append(block.text)
        else:
            parts.append(block.model_dump_json(exclude_none=True))
    return "\n".join(parts)


def _unavailable(server: RequestedServer, error: BaseException) -> Unavailable:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    reason = str(error)[:_MAX_REASON_CHARS] or type(error).__name__
    return Unavailable(f"MCP server {server.label} is unavailable: {reason}", param=server.place)
