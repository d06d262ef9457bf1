"""A small HTTP server on loopback that serves images, and misbehaves on request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class ImageServer:
    """`answers` maps a path to the raw bytes of a whole HTTP response."""

    port: int = 0
    answers: dict[str, bytes] = field(default_factory=dict)
    hits: list[str] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    """`/slow`, `/trickle` and paths that begin with `/held` wait for it."""

    @property
    def hosts(self) -> list[str]:
        """The Host header of each request."""
        lines = [line for head in self.heads for line in head.split("\r\n")]
        return [line[6:] for line in lines if line.lower().startswith("host: ")]

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def serve(self, path: str, body: bytes) -> str:
        """Answer `path` with `body`; returns the URL."""
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n"
        self.answers[path] = head.encode() + body
        return self.url(path)

    def redirect(self, path: str, target: str, status: int = 302) -> str:
        """Answer `path` with a redirect; returns the URL."""
        head = f"HTTP/1.1 {status} Found\r\nlocation: {target}\r\ncontent-length: 0\r\n\r\n"
        self.answers[path] = head.encode()
        return self.url(path)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except (asyncio.IncompleteReadError, ConnectionError):
            # The client gave up before it asked.
            writer.close()
            return
        path = head.split(" ", 2)[1]
        self.hits.append(path)
        self.heads.append(head)
        if path == "/endless":
            await self._stream(writer)
        elif path.startswith("/held"):
            await self.release.wait()
            writer.write(self.answers[path])
        elif path == "/slow":
            await self.release.wait()
        elif path == "/trickle":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nx")
            await self.release.wait()
        else:
            writer.write(self.answers.get(path, b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n"))
        writer.close()

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x" * 65536)
            try:
                await writer.drain()
            except ConnectionError:
                return


@asynccontextmanager
async def image_server() -> AsyncIterator[ImageServer]:
    """Runs until the block ends."""
    server = ImageServer()
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        server.release.set()
        listener.close()
        await listener.wait_closed()
