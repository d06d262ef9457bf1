"""Responses whose model calls tools of an MCP server through the gateway."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.fakes.back_end import BackEnd, fake_tokenizer
from tests.fakes.mcp_server import Tools, mcp_server
from tests.fakes.response_client import Event, ResponseClient, numbers, output_text
from tests.fakes.tool_turns import OFFER, call, in_turns
from tests.servers import free_port
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.tokens import unpack_ids


@pytest.fixture
async def tools() -> AsyncIterator[Tools]:
    async with mcp_server() as server:
        yield server


@pytest.fixture
async def mesh(
    tools: Tools, bus_settings: BusSettings, redis_settings: RedisSettings
) -> AsyncIterator[BackEnd]:
    servers = {
        "calculator": {"url": tools.url, "allowed_tools": ["add", "fail", "large"]},
        "gone": {"url": f"http://127.0.0.1:{free_port()}/mcp"},
    }
    limits = {"mcp_servers": servers, "max_mcp_result_bytes": 2048, "mcp_timeout_s": 5.0}
    async with BackEnd(bus_settings, redis_settings, responses=limits) as back_end:
        back_end.tokenizer.tool_call_parser = "hermes"
        yield back_end


@pytest.fixture
async def client(mesh: BackEnd) -> AsyncIterator[ResponseClient]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=10) as http:
        yield ResponseClient(http, mesh.model)


def say(mesh: BackEnd, *answers: str) -> None:
    mesh.workers[0].script = in_turns(*answers)


def kinds(events: list[Event]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


@pytest.mark.parametrize("store", [True, False])
async def test_the_model_sees_the_result_of_its_call(
    mesh: BackEnd, client: ResponseClient, tools: Tools, store: bool
) -> None:
    say(mesh, call("add", a=17, b=25), "It is 42.")
    response = await client.create(tools=[OFFER], store=store)
    listing, called, message = response["output"]
    assert [tool["name"] for tool in listing["tools"]] == ["add", "fail", "large"]
    assert (called["type"], called["status"], called["output"]) == ("mcp_call", "completed", "42")
    assert message["content"][0]["text"] == "It is 42."
    assert tools.calls == ["add 17 25"]
    assert response["status"] == "completed"
    assert 'tool: "42"' in fake_tokenizer().decode(
        unpack_ids(mesh.workers[0].generates[-1].prompt_ids)
    )


async def test_a_stream_reports_listings_and_calls(mesh: BackEnd, client: ResponseClient) -> None:
    say(mesh, call("add", a=1, b=2), call("add", a=3, b=4), "Done.")
    events = await client.stream(tools=[OFFER])
    assert numbers(events) == list(range(len(events)))
    reported = kinds(events)
    wanted = [
        "in_progress",
        "mcp_list_tools.in_progress",
        "mcp_list_tools.completed",
        "mcp_call.in_progress",
        "mcp_call_arguments.done",
        "mcp_call.completed",
        "output_text.done",
        "completed",
    ]
    places = [reported.index(kind) for kind in wanted]
    assert places == sorted(places)
    assert reported.count("mcp_call.completed") == 2
    assert await client.events(events[0]["response"]["id"]) == events


async def test_max_output_tokens_bounds_all_turns(mesh: BackEnd, client: ResponseClient) -> None:
    said = call("add", a=1, b=2)
    num_tokens = len(fake_tokenizer().encode(said).ids) + 1
    say(mesh, said, "It is three, and so on and so forth.")
    for room in (0, 4):
        response = await client.create(tools=[OFFER], max_output_tokens=num_tokens + room)
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["usage"]["output_tokens"] == num_tokens + room
        assert response["max_output_tokens"] == num_tokens + room
        assert response["output"][1]["output"] == "3"
    assert len(mesh.workers[0].generates) == 3


async def test_calls_of_both_kinds_end_the_response(
    mesh: BackEnd, client: ResponseClient, tools: Tools
) -> None:
    """MCP calls are made; the model sees all results once the client has sent its own."""
    say(mesh, call("add", a=1, b=2) + call("light", on=True), "never said")
    light = {"type": "function", "name": "light", "parameters": {"type": "object"}}
    response = await client.create(tools=[OFFER, light])
    _, made, left = response["output"]
    assert (made["status"], made["output"]) == ("completed", "3")
    assert (left["type"], left["status"]) == ("function_call", "completed")
    assert response["status"] == "completed"
    assert tools.calls == ["add 1 2"]
    assert len(mesh.workers[0].generates) == 1


async def test_the_openai_client_parses_the_items(mesh: BackEnd) -> None:
    say(mesh, call("add", a=17, b=25), "It is 42.")
    url = f"{mesh.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        offer: Any = OFFER
        answer = await client.responses.create(model=mesh.model, input="Hi", tools=[offer])
        assert answer.output_text == "It is 42."
        called = answer.output[1]
        assert called.type == "mcp_call"
        assert (called.name, called.output) == ("add", "42")
        again = await client.responses.retrieve(answer.id)
        assert again.output_text == answer.output_text


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        (call("fail"), "tool fail"),
        (call("large"), "limit"),
        ('<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>', "JSON object"),
    ],
)
async def test_the_model_sees_that_a_call_failed(
    mesh: BackEnd, client: ResponseClient, wrong: str, reported: str
) -> None:
    say(mesh, wrong, "Sorry.")
    response = await client.create(tools=[OFFER])
    called = next(item for item in response["output"] if item["type"] == "mcp_call")
    assert called["status"] == "failed"
    assert reported in json.dumps(called["error"])
    assert output_text(response) == "Sorry."


async def test_calls_are_bounded(mesh: BackEnd, client: ResponseClient, tools: Tools) -> None:
    again = call("add", a=1, b=1)
    say(mesh, again, again, again, "Enough.")
    response = await client.create(tools=[OFFER], max_tool_calls=2)
    states = [item["status"] for item in response["output"] if item["type"] == "mcp_call"]
    assert states == ["completed", "completed", "failed"]
    assert len(tools.calls) == 2
    assert output_text(response) == "Enough."


async def test_tools_that_are_not_allowed_are_not_offered(
    mesh: BackEnd, client: ResponseClient
) -> None:
    say(mesh, "Hello.")
    response = await client.create(tools=[{**OFFER, "allowed_tools": {"tool_names": ["add"]}}])
    assert [tool["name"] for tool in response["output"][0]["tools"]] == ["add"]
    prompt: Any = mesh.tokenizer.received[-1].prompt
    assert b"add" in prompt.tools_json
    assert b"secret" not in prompt.tools_json
    await client.create()
    prompt = mesh.tokenizer.received[-1].prompt
    assert prompt.tools_json is None


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"server_label": "absent"}, 400, "tools[0].server_label"),
        ({"server_label": None}, 400, "tools[0].server_label"),
        ({"server_url": "http://169.254.169.254/"}, 400, "tools[0].server_url"),
        ({"headers": {"a": "b"}}, 400, "tools[0].headers"),
        ({"authorization": "secret"}, 400, "tools[0].authorization"),
        ({"connector_id": "connector_dropbox"}, 400, "tools[0].connector_id"),
        ({"require_approval": "always"}, 400, "tools[0].require_approval"),
        ({"require_approval": None}, 400, "tools[0].require_approval"),
        ({"allowed_tools": "add"}, 400, "tools[0].allowed_tools"),
        ({"allowed_tools": {"read_only": True}}, 400, "tools[0].allowed_tools.read_only"),
        ({"server_label": "gone"}, 503, "tools[0]"),
    ],
)
async def test_an_invalid_mcp_tool_is_refused_by_its_path(
    client: ResponseClient, change: dict[str, Any], status: int, param: str
) -> None:
    body = {"model": client.model, "input": "Hi", "tools": [{**OFFER, **change}]}
    answer = await client.http.post("/v1/responses", json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


async def test_a_response_that_cannot_continue_is_an_error(
    mesh: BackEnd, client: ResponseClient
) -> None:
    say(mesh, call("add", a="not a number " * 10, b=2))
    body = {"model": client.model, "input": "Hi", "tools": [OFFER]}
    answer = await client.http.post("/v1/responses", json=body)
    # The tool's result is longer than the model's context.
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    events = await client.stream(tools=[OFFER])
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert numbers(events) == list(range(len(events)))


async def test_calls_of_the_clients_tools_are_not_executed(
    mesh: BackEnd, client: ResponseClient, tools: Tools
) -> None:
    weather = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    say(mesh, call("add", a=1, b=2) + "\n" + call("weather"), "never said")
    response = await client.create(tools=[OFFER, weather])
    _, added, requested = response["output"]
    assert (added["status"], added["output"]) == ("completed", "3")
    assert (requested["type"], response["status"]) == ("function_call", "completed")
    assert tools.calls == ["add 1 2"]
    answer = {"type": "function_call_output", "call_id": requested["call_id"], "output": "rain"}
    previous = response["id"]
    say(mesh, "x", "It rains, and it is 3.", "It rains, and it is 3.")
    final = await client.create(input=[answer], previous_response_id=previous, tools=[weather])
    assert output_text(final) == "It rains, and it is 3."
