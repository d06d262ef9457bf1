"""McpServers: asks MCP servers, through the official SDK. The only file that knows it.

Each question is a session of its own: whoever goes on with a response need not be who began it.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from tokenmesh.services.gateway.responses.mcp_requested import RequestedServer
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import PayloadTooLarge, TokenMeshError, Unavailable
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.telemetry import span

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import ContentBlock
    from mcp.types import Tool as McpTool

Tool = dict[str, Any]

_MAX_REASON_CHARS: Final = 300


class McpServers:
    """All that requests of this gateway may use."""

    def __init__(self, settings: ResponseSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._running = asyncio.Semaphore(settings.max_mcp_calls_running)

    async def list_tools(self, server: RequestedServer) -> list[Tool]:
        """What the request is offered, as OpenAI shows it. Raises Unavailable."""
        tools: list[Tool] = []
        with span("mcp_list_tools", {"tokenmesh.mcp_server": server.label}):
            async with self._asking(server) as client:
                cursor: str | None = None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    tools.extend(_shape(each) for each in page.tools if server.allows(each.name))
                    cursor = page.next_cursor
                    if cursor is None or len(tools) > self._settings.max_mcp_tools:
                        break
        if len(tools) > self._settings.max_mcp_tools:
            limit = self._settings.max_mcp_tools
            raise PayloadTooLarge(
                f"{server.label} offers more than {limit} tools: choose with allowed_tools",
                param=f"{server.place}.allowed_tools",
            )
        return tools

    async def call(self, server: RequestedServer, name: str, arguments: Mapping[str, Any]) -> str:
        """What the tool answered, as text. Raises ToolFailed, or Unavailable."""
        attributes = {"tokenmesh.mcp_server": server.label, "tokenmesh.mcp_tool": name}
        with span("mcp_call", attributes):
            async with self._asking(server) as client:
                result = await client.call_tool(name, dict(arguments))
        text = _text_of(result.content)
        limit = self._settings.max_mcp_result_bytes
        if len(text.encode()) > limit:
            raise ToolFailed(f"the result is over the limit of {limit} bytes")
        if result.is_error:
            raise ToolFailed(text)
        return text

    @asynccontextmanager
    async def _asking(self, server: RequestedServer) -> "AsyncIterator[Client]":
        """Raises Unavailable when the server cannot be asked, or says that it will not."""
        # Loading the SDK takes a second that a gateway without MCP servers need not spend.
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
            reason = f"{server.label} did not answer within {timeout_s:g} s"
            raise Unavailable(reason, param=server.place) from error
        except (MCPError, httpx2.HTTPError, OSError) as error:
            raise _could_not_ask(server, error) from error
        except ExceptionGroup as group:
            # The SDK's tasks report together what came up in any of them.
            raise _could_not_ask(server, group) from group
        finally:
            self._metrics.counter("mcp_questions", server=server.label, outcome=outcome).inc()


class ToolFailed(TokenMeshError):
    """The tool itself says that it failed; the model is told its words."""

    code = "tool_failed"


def _shape(tool: "McpTool") -> Tool:
    annotations = tool.annotations
    return {
        "name": tool.name,
        "description": tool.description,
        "input_schema": tool.input_schema,
        "annotations": annotations.model_dump(exclude_none=True) if annotations else None,
    }


def _text_of(content: "Sequence[ContentBlock]") -> str:
    """Text as it is; anything else as the JSON that the server sent."""
    from mcp.types import TextContent

    parts = []
    for block in content:
        if isinstance(block, TextContent):
            parts.append(block.text)
        else:
            parts.append(block.model_dump_json(exclude_none=True))
    return "\n".join(parts)


def _could_not_ask(server: RequestedServer, error: BaseException) -> Unavailable:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    reason = str(error)[:_MAX_REASON_CHARS] or type(error).__name__
    return Unavailable(f"{server.label} could not be asked: {reason}", param=server.place)
