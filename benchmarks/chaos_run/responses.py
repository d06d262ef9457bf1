"""Stored responses: begun at one gateway, read on at another when that dies or the client wants it.

No event may be lost or doubled, whichever gateway tells it. The right answers are what the mesh
said without faults.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from benchmarks.chaos_run.completions import leaves
from benchmarks.chaos_run.received import ReceivedChoice, ReceivedResponse
from tokenmesh.cli.bench.client import Reply, Target

_PAUSE_S = 0.1
"""Before another gateway is asked."""
_ENDS = ("response.completed", "response.incomplete", "response.failed")
_PART_BY_KIND = {
    "response.output_text.delta": "text",
    "response.reasoning_text.delta": "reasoning",
    "response.function_call_arguments.delta": "arguments",
}
_SHARE_IN_BACKGROUND = 0.6
_SHARE_THAT_MOVE = 0.5
"""The share of clients of background responses that move without need: the others' responses end
with them."""
_SHARE_READ_AGAIN = 0.25


class _InputDetails(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    input_tokens: int = 0
    input_tokens_details: _InputDetails = msgspec.field(default_factory=_InputDetails)
    output_tokens: int = 0


class _Response(msgspec.Struct):
    id: str
    status: str = ""
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    type: str
    sequence_number: int = -1
    delta: str = ""
    response: _Response | None = None
    code: str | None = None


class _Error(msgspec.Struct):
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class _Reading:
    """The state of a client that reads, over all its connections."""

    received: ReceivedResponse
    events: list[bytes] = field(default_factory=list)
    response_id: str = ""
    ended: _Response | None = None
    fault: str | None = None

    def receive(self, data: bytes) -> None:
        """One event."""
        event = _decode(data)
        if _is_farewell(event):
            return
        if event.type == "error":
            self.fault = self.fault or f"error_{event.code}"
            return
        if event.sequence_number != len(self.events):
            is_late = event.sequence_number > len(self.events)
            self.fault = self.fault or ("event_lost" if is_late else "event_doubled")
        self.events.append(data)
        if event.response is not None:
            self.response_id = self.received.response_id = self.received.described = (
                event.response.id
            )
            self.ended = event.response if event.type in _ENDS else None
        part = _PART_BY_KIND.get(event.type)
        if part is not None:
            self.received.receive(0, part, event.delta, time.perf_counter())


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request and how it ends in peace."""

    body: dict[str, Any]
    texts: dict[str, str]
    status: str
    num_tokens: int


class StoredResponses:
    """Implements `RequestKind`. Use `record`."""

    def __init__(
        self, servers: Mapping[str, list[Target]], recorded: Sequence[Recorded], random: Random
    ) -> None:
        self._servers = servers
        self._recorded = recorded
        self._random = random

    @classmethod
    async def record(
        cls,
        servers: Mapping[str, list[Target]],
        recorder: Target,
        bodies: list[dict[str, Any]],
        random: Random,
    ) -> "StoredResponses":
        """Ask for all of it in peace. Raises ValueError for what fails already then.

        `servers`: by tenant, as it asks them; `recorder`: one of them for now.
        """
        recorded = await asyncio.gather(*(_record(recorder, body) for body in bodies))
        return cls(servers, recorded, random)

    async def send(self, received: ReceivedResponse) -> str | None:
        """See `RequestKind.send`."""
        recorded = self._random.choice(self._recorded)
        received.choices = [ReceivedChoice(recorded.texts)]
        received.kind = "stored"
        received.tenant = self._random.choice([*self._servers])
        reading = _Reading(received)
        is_background = self._random.random() < _SHARE_IN_BACKGROUND
        body = {**recorded.body, "stream": True, "background": is_background, "store": True}
        while not reading.events and reading.fault is None:
            await self._connect("POST", "/v1/responses", body, reading, is_background)
        while reading.ended is None and reading.fault is None:
            path = f"/v1/responses/{reading.response_id}?stream=true"
            path += f"&starting_after={len(reading.events) - 1}"
            await self._connect("GET", path, None, reading, is_background)
        return reading.fault or _judge(reading, recorded) or await self._read_again(reading)

    async def _connect(
        self, method: str, path: str, body: object, reading: _Reading, may_leave: bool
    ) -> None:
        """Read from any gateway, until the end or until that is not possible any more."""
        server = self._server(reading)
        is_to_move = may_leave and self._random.random() < _SHARE_THAT_MOVE
        leave_at = len(reading.events) + self._random.randint(1, 120) if is_to_move else None

        def receive(data: bytes) -> bool:
            reading.receive(data)
            return len(reading.events) != leave_at

        try:
            reply = await _read(server, server.request(method, path, body), receive)
        except OSError as error:
            reason = "moved" if len(reading.events) == leave_at else type(error).__name__
        else:
            reason = "cut" if reply.status == 200 else f"http_{reply.status} {_code_of(reply)}"
            if reply.status != 200 and not leaves(reply):
                reading.fault = f"{method}_{reason}"
        if reading.ended is None:
            reading.received.moves.append(f"{method} {reason}")
            await asyncio.sleep(_PAUSE_S)

    def _server(self, reading: _Reading) -> Target:
        """Any gateway, with the key that the response was begun with."""
        return self._random.choice(self._servers[reading.received.tenant])

    async def _read_again(self, reading: _Reading) -> str | None:
        """Now and then: any gateway tells the same ever after."""
        if self._random.random() > _SHARE_READ_AGAIN:
            return None
        path = f"/v1/responses/{reading.response_id}?stream=true"
        while True:
            again: list[bytes] = []
            server = self._server(reading)
            try:
                reply = await _read(server, server.request("GET", path), again.append)
            except OSError:
                await asyncio.sleep(_PAUSE_S)
                continue
            if again and _is_farewell(_decode(again[-1])):
                again.pop()
            if reply.status != 200 and not leaves(reply):
                return f"again_http_{reply.status}"
            if len(again) < len(reading.events) and again == reading.events[: len(again)]:
                # Its gateway has gone in the middle.
                await asyncio.sleep(_PAUSE_S)
                continue
            return None if again == reading.events else "again_otherwise"


def _is_farewell(event: _Event) -> bool:
    """Return whether a gateway says that it may wait no longer: another one has the rest."""
    return event.type == "error" and event.code == "draining"


def _code_of(reply: Reply) -> str:
    """Read the code of an error in OpenAI's shape."""
    try:
        return msgspec.json.decode(reply.body, type=_ErrorBody).error.code or ""
    except msgspec.MsgspecError:
        return "unreadable"


async def _record(server: Target, body: dict[str, Any]) -> Recorded:
    reading = _Reading(ReceivedResponse(time.perf_counter(), choices=[ReceivedChoice({})]))
    request = server.request("POST", "/v1/responses", {**body, "stream": True})
    await _read(server, request, reading.receive)
    ended = reading.ended
    if reading.fault or ended is None or ended.usage is None:
        raise ValueError(f"{reading.fault} without any disturbance: {body}")
    return Recorded(
        body, reading.received.choices[0].texts, ended.status, ended.usage.output_tokens
    )


async def _read(server: Target, request: bytes, receive: Callable[[bytes], bool | None]) -> Reply:
    """Hang up once `receive` returns False. Raises OSError."""
    connection = await server.connect()

    def on_data(data: bytes) -> None:
        if receive(data) is False:
            connection.close()

    try:
        return await connection.send(request, on_data=on_data)
    finally:
        connection.close()


def _judge(reading: _Reading, recorded: Recorded) -> str | None:
    received, ended = reading.received, reading.ended
    assert ended is not None, "it is read to its end"
    if ended.usage is not None:
        received.num_tokens = ended.usage.output_tokens
        received.stored_usage = Counter(
            requests=1,
            prompt_tokens=ended.usage.input_tokens,
            cached_tokens=ended.usage.input_tokens_details.cached_tokens,
            completion_tokens=ended.usage.output_tokens,
        )
    if ended.status != recorded.status:
        return f"status_{ended.status}"
    is_usage_right = received.num_tokens == recorded.num_tokens
    return received.wrong or (None if is_usage_right else "wrong_usage")
