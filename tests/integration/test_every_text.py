"""Whatever text stands in whatever field: an answer in time, and no other client waits for it.

The fields are those of the OpenAPI document, of the events of realtime sessions, and of the
messages on the bus. A mesh runs in a process of its own, with another client's stream.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Any, Final
from zlib import crc32

import httpx
import msgspec
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.fakes.hostile_bus import concrete
from tests.fakes.hostile_messages import COMMANDS
from tests.fakes.hostile_texts import TEXTS
from tests.fakes.mesh_process import MeshProcess, mesh_process
from tests.fakes.schema_places import Places
from tokenmesh.services.gateway.apis.realtime.events import ClientEvent
from tokenmesh.shared import codec, messages
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.ids import ModelName

MEGABYTE: Final = 1_000_000
ANSWER_S: Final = 15.0
LIVE_S: Final = 0.25
STREAM_GAP_S: Final = 0.5
GROWTH: Final = 1.2
HERE: Final = "\x00here\x00"
"""Stands for the text until a body is sent."""
ENDS: Final = {"/sleep", "/wake_up", "/start_profile", "/stop_profile"}
"""Routes that take a model from everyone."""


@dataclass(frozen=True)
class Ask:
    """A request whose body has a text at one place."""

    path: str
    place: str
    body: Any
    form: bool = False
    always: bool = False
    """True where the short form has it, too."""

    @property
    def name(self) -> str:
        return f"{self.path} {self.place}"


def extra(model: str) -> Iterator[Ask]:
    """Yield requests whose cost lies in several fields together."""
    chats, completions = "/v1/chat/completions", "/v1/completions"
    base = {"model": model, "max_tokens": 2}
    cut = {**base, "truncate_prompt_tokens": 1}
    turn = {"role": "user", "content": "x"}
    hostile = {"role": "user", "content": HERE}
    tool = {"type": "function", "function": {"name": "f", "description": HERE}}
    rule = {"type": "object", "properties": {"a": {"type": "string", "pattern": HERE}}}
    right = {**cut, "truncation_side": "right"}
    ids = [[100, 101]] * 8
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "prompt, cut": (completions, {**cut, "prompt": HERE}),
        "prompt, cut on the right": (completions, {**right, "prompt": HERE}),
        "content, cut": (chats, {**cut, "messages": [turn, hostile]}),
        "suffix of ids": (completions, {**base, "prompt": ids, "suffix": HERE}),
        "bad words": (completions, {**base, "prompt": "x", "bad_words": [HERE]}),
        "tools": (chats, {**base, "messages": [turn], "tools": [tool]}),
        "pattern": (chats, {**base, "messages": [turn], "structured_outputs": {"json": rule}}),
        "template": (chats, {**base, "messages": [turn], "chat_template": HERE}),
    }
    for name, (path, body) in bodies.items():
        yield Ask(path, name, body, always=True)


async def http_asks(mesh: MeshProcess) -> list[Ask]:
    """Every place in every body of the OpenAPI document."""
    document = (await mesh.client.get("/openapi.json")).json()
    short = {"num_predict": 2}
    texts = {"model": mesh.model, "max_tokens": 2, "max_output_tokens": 2, "options": short}
    places = Places(document["components"]["schemas"], texts)
    found = list(extra(mesh.model))
    for path, methods in document["paths"].items():
        if path in ENDS or "post" not in methods:
            continue
        for kind, content in methods["post"].get("requestBody", {}).get("content", {}).items():
            is_form = kind != "application/json"
            url = path.replace("{", "").replace("}", "")
            for place, body in places.filled(content["schema"], HERE):
                found.append(Ask(url, place, body, is_form))
    return found


def event_places() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every place in every event that a client of a realtime session sends."""
    for model in sorted(ClientEvent.__subclasses__(), key=lambda each: each.__name__):
        schema = model.model_json_schema(ref_template="#/$defs/{model}")
        places = Places(schema.get("$defs", {}))
        for place, value in places.filled(schema, HERE):
            yield f"{model.__name__} {place}", value


def message_places(model: ModelName) -> Iterator[tuple[str, type[Any], Any]]:
    """Every place in every message of the bus."""
    kinds = [each for each in vars(messages).values() if isinstance(each, type)]
    structs = [each for each in kinds if issubclass(each, msgspec.Struct)]
    schemas, components = msgspec.json.schema_components(structs)
    places = Places(components, {"model": model})
    for kind, schema in zip(structs, schemas, strict=True):
        if kind.__name__ not in COMMANDS:
            for place, value in places.filled(schema, HERE):
                yield f"{kind.__name__} {place}", kind, value


def packed(value: Any, text: str) -> bytes:
    """The body with a text in its place; the text is written as JSON only once."""
    return json.dumps(value).replace(json.dumps(HERE)[1:-1], _escaped(text)).encode()


def message_bytes(kind: type[Any], value: Any, text: str) -> bytes:
    """A message on the bus; one that is not valid where the place is one of bytes."""
    data = packed(value, text)
    try:
        return codec.encode(msgspec.json.decode(data, type=kind))
    except msgspec.DecodeError:
        return msgspec.msgpack.encode(msgspec.json.decode(data))


_escapes: dict[int, str] = {}


def _escaped(text: str) -> str:
    return _escapes.setdefault(id(text), json.dumps(text, ensure_ascii=False)[1:-1])


@dataclass
class Watch:
    """Watches as another client meanwhile."""

    mesh: MeshProcess
    during: str = "the start"
    problems: list[str] = field(default_factory=list)
    num_tokens: int = 0

    def note(self, what: str, seconds: float, limit_s: float, cpu_s: float) -> None:
        """A pause in which the mesh did not get the processor is the machine's."""
        if min(seconds, cpu_s) > limit_s:
            self.problems.append(f"{what} took {seconds:.2f} s during {self.during}")

    async def live(self) -> None:
        async with httpx.AsyncClient(base_url=self.mesh.url, timeout=30) as client:
            while True:
                began_s, cpu_s = perf_counter(), self.mesh.cpu_s
                assert (await client.get("/livez")).status_code == 200
                self.note("/livez", perf_counter() - began_s, LIVE_S, self.mesh.cpu_s - cpu_s)
                await asyncio.sleep(0.02)

    async def stream(self) -> None:
        body = {"model": self.mesh.model, "prompt": "x", "max_tokens": 4000, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=self.mesh.url, timeout=30) as client:
            while True:
                sending = client.stream("POST", "/v1/completions", json={**body, "stream": True})
                async with sending as answer:
                    assert answer.status_code == 200
                    began_s, cpu_s = perf_counter(), self.mesh.cpu_s
                    async for _ in answer.aiter_bytes():
                        now, used_s = perf_counter(), self.mesh.cpu_s
                        self.note("a token", now - began_s, STREAM_GAP_S, used_s - cpu_s)
                        began_s, cpu_s = now, used_s
                        self.num_tokens += 1


@asynccontextmanager
async def watched(mesh: MeshProcess) -> AsyncIterator[Watch]:
    """Inside the block the mesh is watched; behind it its memory must come back."""
    watch = Watch(mesh)
    warm = {"model": mesh.model, "prompt": "x " * 1000, "max_tokens": 2}
    for _ in range(3):
        assert (await mesh.client.post("/v1/completions", json=warm)).status_code == 200
    before = mesh.memory_bytes
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each()) for each in (watch.live, watch.stream)]
        await until(lambda: watch.num_tokens > 20)
        yield watch
        num_tokens = watch.num_tokens
        await until(lambda: watch.num_tokens > num_tokens + 20)
        for task in tasks:
            task.cancel()
    assert watch.problems == []
    await until(lambda: mesh.memory_bytes <= GROWTH * before)


async def until(is_so: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def send(mesh: MeshProcess, watch: Watch, ask: Ask, kind: str, text: str) -> None:
    watch.during = f"{ask.name}: {kind}"
    content: dict[str, Any] = {"content": packed(ask.body, text)}
    headers = {"content-type": "application/json"}
    if ask.form:
        fields = {name: str(value).replace(HERE, text) for name, value in ask.body.items()}
        content, headers = {"data": fields, "files": {"file": (text[:9999], b"x")}}, {}
    began_s = perf_counter()
    answer = await mesh.client.post(ask.path, **content, headers=headers)
    assert perf_counter() - began_s < ANSWER_S, watch.during
    assert answer.status_code < 500, (watch.during, answer.text[:500])
    assert len(answer.content) < 20 * len(content.get("content", b"")) + 65536, watch.during


async def send_event(mesh: MeshProcess, watch: Watch, name: str, event: Any, text: str) -> None:
    """In a session of its own, which answers or ends."""
    watch.during = name
    url = f"{mesh.url.replace('http', 'ws', 1).rstrip('/')}/v1/realtime?model={mesh.model}"
    async with connect(url, max_size=None) as socket, asyncio.timeout(ANSWER_S):
        with suppress(ConnectionClosed):
            assert "session.created" in await socket.recv(decode=True)
            await socket.send(packed(event, text).decode())
            await socket.recv()


def sample(name: str, share: int, rest: int = 0) -> bool:
    """One of so many, the same ones each time."""
    return crc32(name.encode()) % share == rest


@pytest.fixture
async def mesh(
    tmp_path: Path, bus_settings: BusSettings, redis_settings: RedisSettings
) -> AsyncIterator[MeshProcess]:
    name = ModelName(f"texts-{secrets.token_hex(4)}")
    async with mesh_process(tmp_path, bus_settings, redis_settings, name) as mesh:
        yield mesh


async def try_all(
    mesh: MeshProcess, bus: MessageBus, chars: int, shares: tuple[int, int, int], rest: int = 0
) -> None:
    """One of so many places in requests, in events and in messages, with texts in turn."""
    asks = await http_asks(mesh)
    assert len(asks) > 500
    kinds = cycle(sorted(TEXTS))
    texts = {kind: make(chars) for kind, make in TEXTS.items()}
    async with watched(mesh) as watch:
        for ask in asks:
            if ask.always or sample(ask.name, shares[0], rest % shares[0]):
                kind = next(kinds)
                await send(mesh, watch, ask, kind, texts[kind])
        for name, event in event_places():
            if sample(name, shares[1], rest % shares[1]):
                await send_event(mesh, watch, name, event, texts[next(kinds)])
        for name, struct, value in message_places(mesh.model):
            if sample(name, shares[2], rest % shares[2]):
                watch.during = name
                text = texts[next(kinds)][: bus.max_message_bytes // 8]
                data = message_bytes(struct, value, text)
                subject = mesh.subjects[crc32(name.encode()) % len(mesh.subjects)]
                if len(data) <= bus.max_message_bytes:  # no process can send more
                    await bus._link.send(concrete(subject), data, None)
                await bus.flush()
        watch.during = "the end"


@pytest.mark.timeout(60)  # a mesh is started in a process of its own
async def test_no_text_holds_others(mesh: MeshProcess, bus: MessageBus) -> None:
    await try_all(mesh, bus, MEGABYTE, (32, 8, 24))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rest", range(8))
@pytest.mark.parametrize("chars", [MEGABYTE, 8 * MEGABYTE - 4096])
async def test_no_text_holds_others_wherever_it_stands(
    mesh: MeshProcess, bus: MessageBus, chars: int, rest: int
) -> None:
    await try_all(mesh, bus, chars, (8, 8, 8), rest)
