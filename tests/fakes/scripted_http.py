"""An HTTP server that answers with exactly the bytes that a test wants, and OpenAI-like streams."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def piece(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def usage(count: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": count}})


DONE = b"data: [DONE]\n\n"
GOOD = (piece("a"), piece("b"), piece("c", "length"), usage(3), DONE)


def stream(parts: Sequence[bytes]) -> bytes:
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return head + chunks + b"0\r\n\r\n"


def plain(status: int, body: object) -> bytes:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    return f"{head}\r\n\r\n".encode() + data


Answer = Callable[[str, dict[str, object]], bytes]


async def converse(
    answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answer the requests of one connection, in pieces that fit nothing; hang up after nothing."""
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        data = answer(head.split(" ")[1], json.loads(await reader.readexactly(size) or b"{}"))
        if not data:
            return
        for at in range(0, len(data), 37):
            writer.write(data[at : at + 37])
            await writer.drain()


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """The URL of a server that answers each request with the bytes of `answer(path, body)`."""
    open_connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_connections[task] = writer
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await converse(answer, reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        # A cancelled task of a server is an error in the log of Python 3.11.
        for writer in open_connections.values():
            writer.transport.abort()
        await asyncio.gather(*open_connections)
