"""A scripted MCP server on a free port, over Streamable HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import uvicorn
from mcp.server import MCPServer

from tests.servers import free_port


@dataclass
class Tools:
    """Calls that the server received."""

    url: str
    calls: list[str] = field(default_factory=list)
    delay_s: float = 0.0


@asynccontextmanager
async def mcp_server() -> AsyncIterator[Tools]:
    """A server with the tools `add`, `fail`, `shout` and `large`."""
    port = free_port()
    tools = Tools(f"http://127.0.0.1:{port}/mcp")
    server = uvicorn.Server(
        uvicorn.Config(
            _make_server(tools).streamable_http_app(stateless_http=True),
            port=port,
            log_config=None,
            lifespan="on",
            ws="none",
        )
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    yield tools
    server.should_exit = True
    await serving


def _make_server(tools: Tools) -> MCPServer:
    server = MCPServer("calculator")

    @server.tool()
    async def add(a: int, b: int) -> str:
        """The sum of two numbers."""
        tools.calls.append(f"add {a} {b}")
        await asyncio.sleep(tools.delay_s)
        return str(a + b)

    @server.tool()
    async def fail() -> str:
        """Always fails."""
        tools.calls.append("fail")
        raise ValueError("out of order")

    @server.tool()
    async def large() -> str:
        """Returns too much."""
        return "x" * 100_000

    @server.tool()
    async def secret() -> str:
        """Allowed for some requests only."""
        return "secret"

    return server
