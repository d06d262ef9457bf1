"""Realtime sessions: access, limits, and errors of invalid events."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.realtime import RealtimeErrorEvent
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.fakes.back_end import BackEnd, saying
from tests.fakes.key_file import key_entry
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

Json = dict[str, Any]


def address(mesh: BackEnd, query: str | None = None) -> str:
    requested = f"model={mesh.model}" if query is None else query
    return f"{mesh.url.replace('http', 'ws', 1)}/v1/realtime?{requested}"


@asynccontextmanager
async def session(mesh: BackEnd, **options: Any) -> AsyncIterator[ClientConnection]:
    async with connect(address(mesh), **options) as socket:
        assert json.loads(await socket.recv())["type"] == "session.created"
        yield socket


async def refused(socket: ClientConnection, event: Json | str | bytes) -> Json:
    """The error that an event causes."""
    await socket.send(event if isinstance(event, str | bytes) else json.dumps(event))
    reported = RealtimeErrorEvent.model_validate_json(await socket.recv(), strict=True)
    assert reported.error.type == "invalid_request_error"
    return reported.error.model_dump()


def create(**item: Any) -> Json:
    return {"type": "conversation.item.create", "item": item}


def user_item(**part: Any) -> Json:
    return create(type="message", role="user", content=[part])


def update(**fields: Any) -> Json:
    return {"type": "session.update", "session": {"type": "realtime", **fields}}


def respond(**fields: Any) -> Json:
    return {"type": "response.create", "response": fields}


HI = user_item(type="input_text", text="a")
TOOL = {"type": "function", "name": "f"}
WITH_KEY = "openai-insecure-api-key.sk-1"
MISSING = "missing_required_parameter"
WRONG: list[tuple[Json, str | None, str]] = [
    ({}, "type", MISSING),
    ({"type": 1}, "type", "invalid_type"),
    ({"type": "session.destroy"}, "type", "invalid_value"),
    ({"type": "output_audio_buffer.clear"}, "type", "unsupported_value"),
    ({"type": "input_audio_buffer.append", "audio": "%"}, "audio", "invalid_value"),
    ({"type": "input_audio_buffer.append"}, "audio", MISSING),
    ({"type": "session.update"}, "session", MISSING),
    ({"type": "response.cancel", "event_id": 1}, "event_id", "invalid_type"),
    ({"type": "response.cancel", "extra": 1}, "extra", "unknown_parameter"),
    (update(type="translation"), "session.type", "invalid_value"),
    (update(model="absent"), "model", "model_not_found"),
    (update(instructions=1), "session.instructions", "invalid_type"),
    (update(output_modalities=["audio"]), "session.output_modalities", "unsupported_value"),
    (update(output_modalities=["smell"]), "session.output_modalities[0]", "invalid_value"),
    (update(audio={"output": {"voice": "a"}}), "session.audio.output", "unsupported_value"),
    (update(audio={"input": {"format": 1}}), "session.audio.input.format", "invalid_type"),
    (update(prompt={"id": "p"}), "session.prompt", "unsupported_value"),
    (update(tracing="auto"), "session.tracing", "unsupported_value"),
    (update(truncation="auto"), "session.truncation", "unsupported_value"),
    (update(include=["x"]), "session.include", "unsupported_value"),
    (update(tools=[{"type": "mcp"}]), "session.tools[0].type", "invalid_value"),
    (update(tools=[{"type": "function"}]), "session.tools[0].name", MISSING),
    (update(tools=[TOOL, TOOL]), "session.tools", "invalid_value"),
    (update(tool_choice="maybe"), "session.tool_choice", "invalid_value"),
    (update(tool_choice={"type": "function"}), "session.tool_choice", "invalid_value"),
    (update(tool_choice={"type": "mcp"}), "session.tool_choice.type", "unsupported_value"),
    (update(max_output_tokens=0), "session.max_output_tokens", "invalid_value"),
    (update(max_output_tokens="many"), "session.max_output_tokens", "invalid_value"),
    (update(temperature=-1), "session.temperature", "invalid_value"),
    (update(reasoning={"effort": 1}), "session.reasoning.effort", "invalid_type"),
    (update(novel=1), "session.novel", "unknown_parameter"),
    ({"type": "conversation.item.create"}, "item", MISSING),
    (create(type="hologram"), "item.type", "invalid_value"),
    (create(type="message", role="user"), "item.content", MISSING),
    (create(type="message", role="user", content=[]), "item.content", "invalid_value"),
    (create(type="message", role="tool", content=[{}]), "item.role", "invalid_value"),
    (user_item(type="input_audio", audio=""), "item.content[0].type", "unsupported_value"),
    (user_item(type="output_text", text="a"), "item.content[0].type", "invalid_value"),
    (user_item(type="input_text"), "item.content[0].text", MISSING),
    (user_item(type="input_image"), "item.content[0].image_url", MISSING),
    (create(type="function_call", name="f"), "item.arguments", MISSING),
    (
        create(type="function_call_output", call_id="none", output=""),
        "item.call_id",
        "invalid_tool_call_id",
    ),
    (
        {**user_item(type="input_text", text="a"), "previous_item_id": "x"},
        "previous_item_id",
        "item_create_invalid_previous_item_id",
    ),
    ({"type": "conversation.item.retrieve"}, "item_id", MISSING),
    (
        {"type": "conversation.item.retrieve", "item_id": "x"},
        "item_id",
        "item_retrieve_invalid_item_id",
    ),
    (
        {"type": "conversation.item.delete", "item_id": "x"},
        "item_id",
        "item_delete_invalid_item_id",
    ),
    (
        {
            "type": "conversation.item.truncate",
            "item_id": "x",
            "content_index": 0,
            "audio_end_ms": 5,
        },
        "item_id",
        "item_truncate_invalid_item_id",
    ),
    (respond(output_modalities=["audio"]), "response.output_modalities", "unsupported_value"),
    (respond(audio={"output": {}}), "response.audio", "unsupported_value"),
    (respond(conversation="other"), "response.conversation", "invalid_value"),
    (respond(metadata={"a": 1}), "response.metadata.a", "invalid_type"),
    (respond(input=[{"type": "x"}]), "response.input[0].type", "invalid_value"),
    (respond(input=[{"type": "item_reference"}]), "response.input[0].id", MISSING),
    (
        respond(input=[{"type": "item_reference", "id": "x"}]),
        "response.input[0].id",
        "invalid_value",
    ),
    (user_item(text="a"), "item.content[0].type", MISSING),
    (user_item(type=1), "item.content[0].type", "invalid_type"),
    (create(type=1), "item.type", "invalid_type"),
    ({"type": "conversation.item.truncate", "item_id": "x"}, "content_index", MISSING),
    (
        {"type": "response.cancel", "response_id": "x"},
        None,
        "response_cancel_not_active",
    ),
    ({"type": "input_audio_buffer.commit"}, None, "input_audio_buffer_commit_empty"),
]


async def test_a_function_is_named_as_the_client_wrote_it(mesh: BackEnd) -> None:
    async with session(mesh) as socket:
        await socket.send(json.dumps(HI))
        for _ in range(2):
            await socket.recv()
        error = await refused(socket, respond(tools=[{"type": "function", "name": "a b"}]))
        assert error["param"] == "tools[0].name"
        assert "function.name" not in error["message"]


async def test_errors_name_the_field_and_the_session_continues(mesh: BackEnd) -> None:
    async with session(mesh) as socket:
        for empty in (respond(), {"type": "response.create"}):
            assert "nothing to answer" in (await refused(socket, empty))["message"]
        for event, param, code in WRONG:
            error = await refused(socket, event)
            assert (error["param"], error["code"]) == (param, code), event
            assert param is None or param in error["message"], event
        for text in ("{", "[]", '"a"', "[" * 200 + "]" * 200, ""):
            assert (await refused(socket, text))["code"] == "invalid_json"
        assert (await refused(socket, b"{}"))["code"] == "invalid_event"
        await socket.send(json.dumps(respond(instructions="Say hello.")))
        while (event := json.loads(await socket.recv()))["type"] != "response.done":
            assert event["type"] != "error"
        assert event["response"]["status"] == "completed"


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({}, 401),
        ({"additional_headers": {"authorization": "Bearer sk-2"}}, 401),
        ({"subprotocols": ["realtime"]}, 401),
        ({"subprotocols": ["realtime", "openai-insecure-api-key.sk-2"]}, 401),
        ({"additional_headers": {"authorization": "Bearer sk-1"}}, None),
        ({"additional_headers": {"x-api-key": "sk-1"}}, None),
        ({"subprotocols": ["realtime", WITH_KEY]}, None),
        (
            {"subprotocols": ["realtime", "openai-insecure-api-key.sk-1"], "origin": "http://a"},
            None,
        ),
    ],
)
async def test_a_session_needs_a_key(
    bus_settings: BusSettings, redis_settings: RedisSettings, options: Any, status: int | None
) -> None:
    digest = hashlib.sha256(b"sk-1").hexdigest()
    async with BackEnd(bus_settings, redis_settings, api_key_hashes=(digest,)) as mesh:
        if status is None:
            async with session(mesh, **options) as socket:
                assert socket.subprotocol == ("realtime" if "subprotocols" in options else None)
            return
        with pytest.raises(InvalidStatus) as caught:
            await connect(address(mesh), **options)
        response = caught.value.response
        assert response.status_code == status
        assert json.loads(response.body or b"")["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("origin", "may"),
    [(None, True), ("http://evil.example", False), ("null", False), ("http://ours", True)],
)
async def test_other_origins_are_refused_without_keys(
    bus_settings: BusSettings, redis_settings: RedisSettings, origin: Any, may: bool
) -> None:
    async with BackEnd(bus_settings, redis_settings, cors_origins=("http://ours",)) as mesh:
        if may:
            async with session(mesh, origin=origin):
                pass
            async with session(mesh, origin=mesh.url):
                return
        with pytest.raises(InvalidStatus) as caught:
            await connect(address(mesh), origin=origin)
        assert caught.value.response.status_code == 403


async def test_an_unknown_model_or_route_is_refused_before_it_begins(mesh: BackEnd) -> None:
    for url, status in (
        (address(mesh, "model=absent"), 404),
        (address(mesh).replace("realtime", "unreal"), 403),
    ):
        with pytest.raises(InvalidStatus) as caught:
            await connect(url)
        assert caught.value.response.status_code == status
    async with connect(address(mesh, "")) as socket:
        assert json.loads(await socket.recv())["session"]["model"] == mesh.model


async def test_the_number_of_sessions_is_bounded(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with BackEnd(bus_settings, redis_settings, realtime_max_sessions=2) as mesh:
        async with session(mesh), session(mesh):
            with pytest.raises(InvalidStatus) as caught:
                await connect(address(mesh))
            assert caught.value.response.status_code == 429
            assert caught.value.response.headers["retry-after"] == "5"
        async with session(mesh):
            pass


async def test_a_tenants_sessions_are_bounded(
    bus_settings: BusSettings, redis_settings: RedisSettings, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    keys = [key_entry("sk-few", "few"), key_entry("sk-many", "many")]
    file.write_text("\n".join(["[tenants.few]", "max_sessions = 1", "[tenants.many]", *keys]))
    few, many = ({"authorization": f"Bearer sk-{name}"} for name in ("few", "many"))
    async with BackEnd(bus_settings, redis_settings, keys_file=file) as mesh:
        async with session(mesh, additional_headers=few):
            with pytest.raises(InvalidStatus) as caught:
                await connect(address(mesh), additional_headers=few)
            assert caught.value.response.status_code == 429
            assert b"its limit of 1 realtime sessions" in (caught.value.response.body or b"")
            async with (
                session(mesh, additional_headers=many),
                session(mesh, additional_headers=many),
            ):
                pass
        async with session(mesh, additional_headers=few):
            pass


async def test_items_are_bounded(bus_settings: BusSettings, redis_settings: RedisSettings) -> None:
    async with (
        BackEnd(
            bus_settings, redis_settings, realtime_max_items=3, realtime_max_session_bytes=1024
        ) as mesh,
        session(mesh) as socket,
    ):
        large = await refused(socket, user_item(type="input_text", text="x" * 1024))
        assert "1024" in large["message"]
        for index in range(3):
            item = {**HI["item"], "id": f"i{index}"}
            await socket.send(json.dumps(create(**item)))
            await socket.recv()
            await socket.recv()
        assert (await refused(socket, HI))["param"] == "item"
        assert (await refused(socket, respond()))["param"] == "item"
        assert (await refused(socket, create(**item)))["code"] == "invalid_value"
        await socket.send(json.dumps({"type": "conversation.item.delete", "item_id": "i0"}))
        await socket.recv()
        assert (await refused(socket, create(**item)))["code"] == "item_create_duplicate_item_id"
        spoken = {"type": "conversation.item.truncate", "content_index": 0, "audio_end_ms": 0}
        untold = await refused(socket, {**spoken, "item_id": "i1"})
        assert untold["code"] == "unsupported_content_type"


async def test_a_message_that_is_too_large_ends_the_session(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    mesh = BackEnd(bus_settings, redis_settings, realtime_max_message_bytes=2048)
    async with mesh, session(mesh) as socket:
        await socket.send("x" * 4096)
        with pytest.raises(ConnectionClosed) as caught:
            await socket.recv()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1009


@pytest.mark.parametrize("name", ["realtime_idle_timeout_s", "realtime_session_timeout_s"])
async def test_sessions_end_in_time(
    bus_settings: BusSettings, redis_settings: RedisSettings, name: str
) -> None:
    limits: Json = {name: 0.3}
    mesh = BackEnd(bus_settings, redis_settings, **limits)
    async with mesh, session(mesh) as socket:
        reported = json.loads(await socket.recv())
        assert reported["error"]["code"] == "session_expired"
        with pytest.raises(ConnectionClosed) as caught:
            await socket.recv()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1000


async def test_a_response_keeps_a_session_from_being_idle(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    mesh = BackEnd(bus_settings, redis_settings, saying("a b c"), realtime_idle_timeout_s=1.0)
    mesh.step_s = 0.4
    async with mesh, session(mesh) as socket:
        await socket.send(json.dumps(respond(instructions="Say.")))
        kinds = []
        while "response.done" not in kinds:
            kinds.append(json.loads(await socket.recv())["type"])
        assert "error" not in kinds


async def test_a_client_that_does_not_answer_pings_is_disconnected(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    mesh = BackEnd(
        bus_settings, redis_settings, realtime_ping_interval_s=0.2, realtime_ping_timeout_s=1.0
    )
    async with mesh, session(mesh, close_timeout=0.1) as socket:
        await asyncio.sleep(1.5)
        await refused(socket, "{")
        socket.transport.pause_reading()
        gone = "websocket_connections_active 0.0"
        await mesh.until(lambda: gone in mesh.metrics.render().decode())
        socket.transport.resume_reading()


async def test_a_slow_client_is_disconnected(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    mesh = BackEnd(bus_settings, redis_settings, write_timeout_s=1.0)
    async with mesh, session(mesh, close_timeout=0.1, ping_interval=None) as socket:
        text = user_item(type="input_text", text="x" * 500_000)
        await socket.send(json.dumps(text))
        await socket.recv()
        item_id = json.loads(await socket.recv())["item"]["id"]
        socket.transport.pause_reading()
        for _ in range(40):
            event = {"type": "conversation.item.retrieve", "item_id": item_id}
            await socket.send(json.dumps(event))
        gone = "websocket_connections_active 0.0"
        await mesh.until(lambda: gone in mesh.metrics.render().decode())
        socket.transport.resume_reading()


@pytest.mark.filterwarnings("ignore:connect")
async def test_the_blocking_client(mesh: BackEnd) -> None:
    def talk() -> list[str]:
        client = openai.OpenAI(
            base_url="http://x", api_key="k", websocket_base_url=mesh.url + "/v1"
        )
        kinds: list[str] = []
        with client, client.realtime.connect(model=mesh.model) as connection:
            connection.response.create(response={"instructions": "Say hello."})
            for event in connection:
                kinds.append(event.type)
                if event.type == "response.done":
                    return kinds
        return kinds

    kinds = await asyncio.to_thread(talk)
    assert (kinds[0], kinds[-1]) == ("session.created", "response.done")


async def _read_all(socket: ClientConnection) -> None:
    while True:
        await socket.recv()


async def test_a_stopping_gateway_closes_with_a_restart_code(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    mesh = BackEnd(bus_settings, redis_settings, saying("word " * 40))
    mesh.step_s = 0.05
    async with mesh, connect(address(mesh)) as socket:
        await socket.send(json.dumps(respond(instructions="Say.")))
        while json.loads(await socket.recv())["type"] != "response.output_text.delta":
            continue
        await mesh.__aexit__()
        with pytest.raises(ConnectionClosed) as caught:
            await _read_all(socket)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1012
    assert mesh.workers[0].cancels


async def test_a_draining_gateway_opens_no_sessions(mesh: BackEnd) -> None:
    mesh.gateway.core.draining.set()
    with pytest.raises(InvalidStatus) as caught:
        await connect(address(mesh))
    assert caught.value.response.status_code == 503


async def raw_session(mesh: BackEnd) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A session on a raw socket."""
    host, port = mesh.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"GET /v1/realtime?model={mesh.model} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
    )
    assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def test_pings_of_a_client_that_never_reads_end_its_connection(mesh: BackEnd) -> None:
    reader, writer = await raw_session(mesh)
    ping = b"\x89\xfd\x00\x00\x00\x00" + b"x" * 125

    async def flood() -> None:
        while True:
            writer.write(ping * 1000)
            await writer.drain()

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(flood(), 15)
    assert not reader.at_eof()
    writer.close()


async def test_a_message_of_endless_fragments_is_refused(mesh: BackEnd) -> None:
    reader, writer = await raw_session(mesh)
    writer.write(b"\x01\x80\x00\x00\x00\x00" + b"\x00\x80\x00\x00\x00\x00" * 5000)
    async with asyncio.timeout(10):
        reported = await reader.read()
    assert reported[-22:-20] == b"\x88\x14"
    assert reported[-20:] == (1009).to_bytes(2, "big") + b"too many fragments"
    writer.close()
