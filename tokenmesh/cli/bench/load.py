"""Sending a workload: N at a time (closed loop), or at random moments of a given rate (open)."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from tokenmesh.cli.bench.client import Connection, Reply, Target
from tokenmesh.cli.bench.recordings import RecordingFile, TranscriptReader
from tokenmesh.cli.bench.workload import Ask, RequestShape
from tokenmesh.shared.clock import perf_s


@dataclass(slots=True)
class Outcome:
    """One request, measured. Times are `perf_s` seconds."""

    began_s: float
    """When it was due: waiting for a free connection counts."""
    ended_s: float = 0.0
    token_times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    """The kind: http_429, timeout, hung_up, truncated, wrong_count, ..."""
    recording: RecordingFile | None = None
    text: str = ""
    """The transcript of the recording."""


_EARLY_S: Final = 0.001
"""A timer of the event loop may be so much too early: no request is sent before it is due."""

OnOutcome = Callable[[Outcome], None]


class Load:
    """Sends asks over at most `concurrency` connections."""

    def __init__(
        self,
        server: Target,
        shape: RequestShape,
        concurrency: int,
        timeout_s: float,
        report: OnOutcome,
    ) -> None:
        self._server = server
        self._shape = shape
        self._concurrency = concurrency
        self._slots = asyncio.Semaphore(concurrency)
        self._idle: list[Connection] = []
        self._timeout_s = timeout_s
        self._report = report

    async def connect(self) -> None:
        """Open what is not open of all connections. Raises OSError."""
        self._idle = [each for each in self._idle if each.is_open]
        while len(self._idle) < self._concurrency:
            self._idle.append(await self._server.connect())

    async def closed(self, asks: Sequence[Ask]) -> list[Outcome]:
        """Send the next one when an earlier one has ended."""
        outcomes = []
        async with asyncio.TaskGroup() as group:
            for ask in asks:
                await self._slots.acquire()
                outcome = Outcome(perf_s())
                outcomes.append(outcome)
                group.create_task(self._run(ask, outcome))
        return outcomes

    async def open(
        self, asks: Sequence[Ask], rate: float, random: Random, burstiness: float = 1.0
    ) -> list[Outcome]:
        """Send `rate` a second on average, whatever the server does.

        Gaps have a gamma distribution of shape `burstiness`: 1 is a Poisson process, less comes in
        bursts, more comes evenly.
        """
        outcomes = []
        due_s = perf_s()
        async with asyncio.TaskGroup() as group:
            for ask in asks:
                await asyncio.sleep(max(0.0, due_s - perf_s()) + _EARLY_S)
                outcome = Outcome(due_s)
                outcomes.append(outcome)
                group.create_task(self._wait_and_run(ask, outcome))
                due_s += random.gammavariate(burstiness, 1 / (rate * burstiness))
        return outcomes

    def close(self) -> None:
        """Hang up all connections."""
        while self._idle:
            self._idle.pop().close()

    async def _wait_and_run(self, ask: Ask, outcome: Outcome) -> None:
        await self._slots.acquire()
        await self._run(ask, outcome)

    async def _run(self, ask: Ask, outcome: Outcome) -> None:
        connection = None
        outcome.recording = ask.recording
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._connection()
                request = self._shape.request(self._server, ask)
                if ask.recording is None:
                    reply = await connection.send(request)
                else:
                    reply = await _transcribe(connection, request, outcome)
            self._note(outcome, ask, reply)
        except TimeoutError:
            outcome.error = "timeout"
        except ConnectionError as error:
            outcome.error = "refused" if isinstance(error, ConnectionRefusedError) else "hung_up"
        except OSError as error:
            outcome.error = type(error).__name__
        finally:
            self._slots.release()
            outcome.ended_s = outcome.ended_s or perf_s()
            self._put_back(connection, outcome)
            self._report(outcome)

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return await self._server.connect()

    def _put_back(self, connection: Connection | None, outcome: Outcome) -> None:
        if connection is None:
            return
        if outcome.error is None and connection.is_open:
            self._idle.append(connection)
        else:
            connection.close()

    def _note(self, outcome: Outcome, ask: Ask, reply: Reply) -> None:
        outcome.ended_s = reply.ended_s
        outcome.token_times = reply.token_times
        if reply.usage is not None:
            outcome.prompt_tokens = reply.usage.prompt_tokens
            outcome.output_tokens = reply.usage.completion_tokens
        outcome.error = fault(reply, ask.output_len if self._shape.ignore_eos else None)


async def _transcribe(connection: Connection, request: bytes, outcome: Outcome) -> Reply:
    """The reply to a recording, as one to a prompt; the transcript is the outcome's."""
    reader = TranscriptReader()
    reply = await connection.send(request, on_data=reader.push)
    outcome.text = reader.text
    reply.token_times, reply.usage, reply.error = reader.token_times, reader.usage, reader.error
    reply.is_done |= reader.is_done
    return reply


def fault(reply: Reply, output_len: int | None) -> str | None:
    """Name what is wrong with an answer that should bring `output_len` tokens (None: any)."""
    if reply.status != 200:
        return f"http_{reply.status}"
    if reply.error is not None:
        return f"stream_{reply.error}"
    if not reply.is_done:
        return "truncated"
    if reply.usage is None:
        return "no_usage"
    if output_len is not None and reply.usage.completion_tokens != output_len:
        return "wrong_count"
    return None
