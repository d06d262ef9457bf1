"""Player: sends each request of a trace at its time, whatever the mesh does."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.replay_run.prompts import Prompts
from benchmarks.replay_run.trace import Entry
from tokenmesh.cli.bench.client import Connection, StreamChunk, Target
from tokenmesh.cli.bench.load import fault


@dataclass(slots=True)
class PlayedRequest:
    """One request; times are seconds of the trace."""

    due_s: float
    late_s: float = 0.0
    """The delay of the request: above a tenth of a second the sender is the load."""
    first_s: float | None = None
    """From when it was due to the first token."""
    ended_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


class Player:
    """Replays against one or more gateways, `speed` times as fast as the trace."""

    def __init__(
        self,
        servers: Sequence[Target],
        model: str,
        prompts: Prompts,
        *,
        speed: float,
        timeout_s: float,
    ) -> None:
        """`timeout_s`: for one request, in the trace's time."""
        self._servers = servers
        self._model = model
        self._prompts = prompts
        self._speed = speed
        self._timeout_s = timeout_s / speed
        self._idle: list[list[Connection]] = [[] for _ in servers]

    async def play(self, entries: Sequence[Entry]) -> list[PlayedRequest]:
        """Send each entry at its time; return the results."""
        began = time.perf_counter()
        played = []
        async with asyncio.TaskGroup() as group:
            for number, entry in enumerate(entries):
                due = began + entry.at_s / self._speed
                await asyncio.sleep(due - time.perf_counter())
                one = PlayedRequest(entry.at_s, late_s=(time.perf_counter() - due) * self._speed)
                played.append(one)
                group.create_task(self._run(entry, one, due, number % len(self._servers)))
        self._close()
        return played

    async def play_closed(self, entries: Sequence[Entry], concurrency: int) -> list[PlayedRequest]:
        """Send one as soon as an earlier one of so many has ended; return the results."""
        began = time.perf_counter()
        played = []
        slots = asyncio.Semaphore(concurrency)
        async with asyncio.TaskGroup() as group:
            for number, entry in enumerate(entries):
                await slots.acquire()
                due = time.perf_counter()
                one = PlayedRequest((due - began) * self._speed)
                played.append(one)
                task = group.create_task(self._run(entry, one, due, number % len(self._servers)))
                task.add_done_callback(lambda _: slots.release())
        self._close()
        return played

    def _close(self) -> None:
        for connections in self._idle:
            while connections:
                connections.pop().close()

    async def _run(self, entry: Entry, played: PlayedRequest, due: float, index: int) -> None:
        server, idle = self._servers[index], self._idle[index]

        def on_chunk(chunk: StreamChunk) -> None:
            if played.first_s is None and chunk.choices:
                played.first_s = (time.perf_counter() - due) * self._speed

        try:
            async with asyncio.timeout(self._timeout_s):
                connection = _still_open(idle) or await server.connect()
                request = server.request("POST", "/v1/completions", self._body(entry))
                reply = await connection.send(request, on_chunk)
            played.error = fault(reply, max(1, entry.output_length))
            if reply.usage is not None:
                played.prompt_tokens = reply.usage.prompt_tokens
                details = reply.usage.prompt_tokens_details
                played.cached_tokens = details.cached_tokens if details else 0
            if connection.is_open:
                idle.append(connection)
        except (TimeoutError, OSError) as error:
            played.error = type(error).__name__
        played.ended_s = (time.perf_counter() - due) * self._speed

    def _body(self, entry: Entry) -> dict[str, object]:
        return {
            "model": self._model,
            "prompt": self._prompts.of(entry),
            "max_tokens": max(1, entry.output_length),
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def _still_open(idle: list[Connection]) -> Connection | None:
    """The one used last; a server closes what is idle for seconds."""
    while idle:
        if (connection := idle.pop()).is_open:
            return connection
    return None
