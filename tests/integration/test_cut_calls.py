"""Every API takes back calls that were cut, and refuses what it would not honor."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.fakes.demo_mesh import demo_mesh
from tests.servers import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUESTION = "What is the weather in Paris?"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "The weather", "parameters": SCHEMA}
CUT = '{"city": "Pa'
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": CUT}}
RESULT = "interrupted"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(nats_server: Server, redis_server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with demo_mesh(nats_server, redis_server) as client:
        yield client


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> httpx.Response:
    response = await client.post(path, json={"model": "demo", **body})
    assert response.status_code == 200, response.text
    return response


def warned(response: httpx.Response, field: str) -> bool:
    warnings = response.headers.get_list("x-tokenmesh-warning")
    return any(each.startswith(f"{field} is not JSON") for each in warnings)


def chat(call: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": RESULT},
    ]


async def test_a_chats_cut_call_is_taken_back(client: httpx.AsyncClient) -> None:
    tools = [{"type": "function", "function": WEATHER}]
    first = [{"role": "user", "content": QUESTION}]
    body = {"messages": first, "tools": tools, "max_tokens": 16}
    answer = (await post(client, "/v1/chat/completions", **body)).json()["choices"][0]
    assert answer["finish_reason"] == "length"
    (call,) = answer["message"]["tool_calls"]
    assert not call["function"]["arguments"].endswith("}")
    body |= {"messages": chat(call)}
    answered = await post(client, "/v1/chat/completions", **body)
    assert warned(answered, "messages[1].tool_calls[0].function.arguments")
    streamed = await post(client, "/v1/chat/completions", **body, stream=True)
    assert warned(streamed, "messages[1].tool_calls[0].function.arguments")


async def test_a_stored_responses_cut_call_is_taken_back(client: httpx.AsyncClient) -> None:
    fields = {"tools": [{"type": "function", **WEATHER}], "max_output_tokens": 16}
    first = (await post(client, "/v1/responses", input=QUESTION, **fields, store=True)).json()
    assert first["incomplete_details"] == {"reason": "max_output_tokens"}
    (call,) = first["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}
    for more in ({}, {"stream": True}, {"store": False}):
        answered = await post(
            client, "/v1/responses", previous_response_id=first["id"], input=[output], **more
        )
        assert warned(answered, "previous_response_id.arguments")
    items = [{"role": "user", "content": QUESTION}, call, output]
    answered = await post(client, "/v1/responses", input=items, store=False)
    assert warned(answered, "input[1].arguments")


async def test_a_messages_cut_call_is_taken_back(client: httpx.AsyncClient) -> None:
    for given in (CUT, {"INVALID_JSON": CUT}):
        use = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": given}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": RESULT}
        messages = [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        answered = await post(client, "/v1/messages", messages=messages, max_tokens=8)
        assert warned(answered, "messages[1].content[0].input")


async def test_ollamas_cut_call_is_taken_back(client: httpx.AsyncClient) -> None:
    for given in (CUT, {"__invalid_json__": CUT}):
        call = {"function": {"name": "get_weather", "arguments": given}}
        messages = [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_name": "get_weather", "content": RESULT},
        ]
        answered = await post(client, "/api/chat", messages=messages, stream=False)
        assert warned(answered, "messages[1].tool_calls[0].function.arguments")


async def test_the_warning_of_one_of_several_chats_names_it(client: httpx.AsyncClient) -> None:
    chats = [[{"role": "user", "content": "Hi"}], chat(CALL)]
    answered = await post(client, "/v1/chat/completions/batch", messages=chats, max_tokens=4)
    assert warned(answered, "messages[1][1].tool_calls[0].function.arguments")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}),
        ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
async def test_guided_fields_are_refused_in_every_api(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    for fields in ({"guided_regex": "a"}, {"extra_body": {"guided_choice": ["a"]}}):
        refused = await client.post(path, json={"model": "demo", **body, **fields})
        assert refused.status_code == 400
        assert "structured_outputs" in refused.text
