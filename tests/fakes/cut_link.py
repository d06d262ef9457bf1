"""CutLink: a TCP proxy on loopback that drops what passes through it while it is cut."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_READ_BYTES = 1 << 16


class CutLink:
    """Connections stay open while cut, as behind a switch that has lost its power.

    One that was open then never works again: the peers' kernels have lost their place in it. One
    that is opened meanwhile works once the link does.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._is_whole = asyncio.Event()
        self._is_whole.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_dead: dict[asyncio.Task[None], bool] = {}
        self.port = 0

    @classmethod
    @asynccontextmanager
    async def to(cls, server_port: int, port: int = 0) -> AsyncIterator["CutLink"]:
        """A proxy before a port of loopback; `port` 0: any that is free."""
        link = cls(server_port)
        server = await asyncio.start_server(link._serve, "127.0.0.1", port)
        link.port = server.sockets[0].getsockname()[1]
        try:
            yield link
        finally:
            server.close()
            for task in tuple(link._tasks):
                task.cancel()
            await asyncio.gather(*link._tasks, return_exceptions=True)
            await asyncio.sleep(0)

    def cut(self) -> None:
        self._is_whole.clear()
        self._is_dead = dict.fromkeys(self._is_dead, True)

    def repair(self) -> None:
        """Connections work again, except those that were open at the cut."""
        self._is_whole.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._is_dead[task] = False
        try:
            await self._is_whole.wait()
            upstream_reader, upstream = await asyncio.open_connection(
                "127.0.0.1", self._server_port
            )
        # a task of streams that is cancelled would be logged as an error
        except (OSError, asyncio.CancelledError):
            writer.close()
            del self._is_dead[task]
            self._tasks.discard(task)
            return
        try:
            with suppress(OSError, asyncio.CancelledError):
                await asyncio.gather(
                    self._copy(task, reader, upstream), self._copy(task, upstream_reader, writer)
                )
        finally:
            for each in (writer, upstream):
                each.transport.abort()
            self._tasks.discard(task)
            del self._is_dead[task]

    async def _copy(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(_READ_BYTES):
            if not self._is_dead[task]:
                writer.write(data)
                await writer.drain()
        if self._is_dead[task]:
            # that a peer has closed does not arrive either
            await asyncio.Event().wait()
        writer.close()
