"""Chats whose expected answers are those of the mesh without faults."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

import msgspec

from benchmarks.chaos_run.completions import fault_of_reply, note_usage
from benchmarks.chaos_run.received import ReceivedChoice, ReceivedResponse
from tokenmesh.cli.bench.client import ChunkChoice, StreamChunk, Target

Body = dict[str, Any]

_PAUSE_S: Final = 0.1
_FAREWELLS: Final = ("draining", "stream_draining")
"""A gateway that drains answers so."""
_KIND_BY_FIELD: Final = {
    "response_format": "guided",
    "tools": "tools",
    "n": "n > 1",
    "logprobs": "logprobs",
    "stop": "stop",
}


class _Function(msgspec.Struct):
    name: str = ""
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int = 0
    function: _Function = msgspec.field(default_factory=_Function)


@dataclass(frozen=True, slots=True)
class Chat:
    """A request, the expected texts of each choice, and the tokens of all."""

    body: Body
    choices: list[dict[str, str]]
    num_tokens: int


class Chats:
    """Implements `RequestKind`. Use `record`."""

    def __init__(
        self,
        servers: Mapping[str, list[Target]],
        chats: list[Chat],
        random: Random,
        *,
        is_salted: bool = False,
        asks_again: bool = False,
    ) -> None:
        self._is_salted = is_salted
        self._asks_again = asks_again
        self._servers = servers
        self._chats = chats
        self._random = random

    @classmethod
    async def record(
        cls,
        servers: Mapping[str, list[Target]],
        recorder: Target,
        bodies: list[Body],
        random: Random,
        *,
        predicts: bool = False,
        is_salted: bool = False,
    ) -> "Chats":
        """Ask for all of it in peace. Raises ValueError for what fails already then.

        `servers`: by tenant, as it asks them; `recorder`: one of them for now. `predicts`: later
        each is asked with a prediction that is nearly its answer. `is_salted`: nothing is in the
        prefix cache when it is asked for.
        """
        chats = await asyncio.gather(*(_record(recorder, body) for body in bodies))
        if predicts:
            chats = [_predicted(each) for each in chats]
        return cls(servers, chats, random, is_salted=is_salted)

    def asking_again(self, servers: Mapping[str, list[Target]], random: Random) -> "Chats":
        """Return the same chats at gateways that may die: what one has begun is asked again."""
        return Chats(servers, self._chats, random, is_salted=self._is_salted, asks_again=True)

    async def send(self, received: ReceivedResponse) -> str | None:
        """See `RequestKind.send`."""
        chat = self._random.choice(self._chats)
        received.described = repr(chat.body)
        received.kind = kind_of(chat.body)
        received.tenant = self._random.choice([*self._servers])
        salt = {"cache_salt": f"{self._random.getrandbits(64):x}"} if self._is_salted else {}
        fault: str | None
        left: str | None
        while True:
            server = self._random.choice(self._servers[received.tenant])
            try:
                fault = await _send(server, {**chat.body, **salt}, received)
            except OSError as error:
                if not self._asks_again:
                    raise
                fault = left = type(error).__name__
            else:
                left = fault if self._asks_again and fault in _FAREWELLS else None
            for shown, expected in zip(received.choices, chat.choices, strict=True):
                shown.expected = expected
            if left is None:
                break
            if received.is_otherwise:
                return "wrong_beginning"
            received.moves.append(f"chat {left}")
            await asyncio.sleep(_PAUSE_S)
        is_usage_right = received.num_tokens == chat.num_tokens
        return fault or received.wrong or (None if is_usage_right else "wrong_usage")


def kind_of(body: Body) -> str:
    """Name the purpose of a chat, by its first field that is out of the ordinary."""
    return next((kind for field, kind in _KIND_BY_FIELD.items() if field in body), "plain")


def _predicted(chat: Chat) -> Chat:
    text = chat.choices[0].get("text", "")
    near = text[: len(text) // 3] + "?" + text[len(text) // 3 + 1 :]
    prediction = {"type": "content", "content": near}
    return replace(chat, body={**chat.body, "prediction": prediction})


async def _record(server: Target, body: Body) -> Chat:
    received = ReceivedResponse(time.perf_counter())
    fault = await _send(server, body, received)
    if fault is not None:
        raise ValueError(f"{fault} without any disturbance: {body}")
    return Chat(body, [shown.texts for shown in received.choices], received.num_tokens)


async def _send(server: Target, body: Body, received: ReceivedResponse) -> str | None:
    received.choices = [ReceivedChoice({}) for _ in range(body.get("n", 1))]

    def receive(chunk: StreamChunk) -> None:
        now = time.perf_counter()
        received.response_id = chunk.id
        for choice in chunk.choices:
            _receive(choice, received, now)

    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    connection = await server.connect()
    try:
        request = server.request("POST", "/v1/chat/completions", streamed)
        reply = await connection.send(request, receive)
    finally:
        connection.close()
    note_usage(reply, received)
    return fault_of_reply(reply, received)


def _receive(choice: ChunkChoice, received: ReceivedResponse, now: float) -> None:
    delta, shown = choice.delta, received.choices[choice.index]
    if delta is None:
        return
    if delta.content:
        received.receive(choice.index, "text", delta.content, now)
    if delta.reasoning:
        received.receive(choice.index, "reasoning", delta.reasoning, now)
    for data in delta.tool_calls or ():
        call = msgspec.json.decode(data, type=_ToolCall)
        shown.add(f"name_of_call_{call.index}", call.function.name)
        received.receive(choice.index, f"call_{call.index}", call.function.arguments or "", now)
    if choice.logprobs is not None:
        shown.add("logged", "".join(each.token for each in choice.logprobs.content or ()))
    shown.add("finish", choice.finish_reason or "")
