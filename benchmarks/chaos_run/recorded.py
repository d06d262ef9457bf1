"""Chats whose right answers are what the mesh said while nobody disturbed it."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import msgspec

from benchmarks.chaos_run.completions import fault_of_reply, note_usage
from benchmarks.chaos_run.heard import Heard, Told
from tokenmesh.cli.bench.client import ChunkChoice, StreamChunk, Target

Body = dict[str, Any]

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
    """A request, what each choice of its answer must say, and the tokens of all."""

    body: Body
    choices: list[dict[str, str]]
    num_tokens: int


class Chats:
    """Implements `Asker`. Use `record`."""

    def __init__(
        self, servers: Mapping[str, list[Target]], chats: list[Chat], random: Random
    ) -> None:
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
    ) -> "Chats":
        """Ask for all of it in peace. Raises ValueError for what fails already then.

        `servers`: by tenant, as it asks them; `recorder`: one of them for now.
        """
        chats = await asyncio.gather(*(_record(recorder, body) for body in bodies))
        return cls(servers, chats, random)

    async def ask(self, heard: Heard) -> str | None:
        """See `Asker.ask`."""
        chat = self._random.choice(self._chats)
        heard.asked = repr(chat.body)
        heard.kind = kind_of(chat.body)
        heard.tenant = self._random.choice([*self._servers])
        server = self._random.choice(self._servers[heard.tenant])
        fault = await _send(server, chat.body, heard)
        for told, expected in zip(heard.choices, chat.choices, strict=True):
            told.expected = expected
        is_usage_right = heard.num_tokens == chat.num_tokens
        return fault or heard.wrong or (None if is_usage_right else "wrong_usage")


def kind_of(body: Body) -> str:
    """What a chat is for, by its first field that is out of the ordinary."""
    return next((kind for field, kind in _KIND_BY_FIELD.items() if field in body), "plain")


async def _record(server: Target, body: Body) -> Chat:
    heard = Heard(time.perf_counter())
    fault = await _send(server, body, heard)
    if fault is not None:
        raise ValueError(f"{fault} without any disturbance: {body}")
    return Chat(body, [told.said for told in heard.choices], heard.num_tokens)


async def _send(server: Target, body: Body, heard: Heard) -> str | None:
    heard.choices = [Told({}) for _ in range(body.get("n", 1))]

    def hear(chunk: StreamChunk) -> None:
        now = time.perf_counter()
        heard.response_id = chunk.id
        for choice in chunk.choices:
            _hear(choice, heard, now)

    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    connection = await server.connect()
    try:
        request = server.request("POST", "/v1/chat/completions", streamed)
        reply = await connection.send(request, hear)
    finally:
        connection.close()
    note_usage(reply, heard)
    return fault_of_reply(reply, heard)


def _hear(choice: ChunkChoice, heard: Heard, now: float) -> None:
    delta, told = choice.delta, heard.choices[choice.index]
    if delta is None:
        return
    if delta.content:
        heard.hear(choice.index, "text", delta.content, now)
    if delta.reasoning:
        heard.hear(choice.index, "reasoning", delta.reasoning, now)
    for data in delta.tool_calls or ():
        call = msgspec.json.decode(data, type=_ToolCall)
        told.add(f"name_of_call_{call.index}", call.function.name)
        heard.hear(choice.index, f"call_{call.index}", call.function.arguments or "", now)
    if choice.logprobs is not None:
        told.add("logged", "".join(each.token for each in choice.logprobs.content or ()))
    told.add("finish", choice.finish_reason or "")
