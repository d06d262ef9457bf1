"""A constraint and tools in one request: the answer is what the constraint says, or calls."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.fakes.demo_mesh import demo_mesh
from tests.servers import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

WEATHER = "What is the weather in Paris?"
NO_TOOL = "Hello"
ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "string", "pattern": "[a-z]{1,4}"}},
    "required": ["answer"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "The weather in a city", "parameters": CITY}
TOOLS = [{"type": "function", "function": FUNCTION}]
STRICT = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
NO_CALL = {"logit_bias": {"1530": -100}}
"""The demo model rather calls than answers in JSON: this is the token with which it would."""
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(nats_server: Server, redis_server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with demo_mesh(nats_server, redis_server) as client:
        yield client


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await client.post(path, json={"model": "demo", **body})
    assert response.status_code == 200, response.text
    return response.json()


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def chat(client: httpx.AsyncClient, text: str, **fields: Any) -> Any:
    fields = {"tools": TOOLS, "max_tokens": 60, **fields}
    (choice,) = (await post(client, "/v1/chat/completions", messages=user(text), **fields))[
        "choices"
    ]
    return choice


def is_answer(text: str) -> bool:
    return set(json.loads(text)) == {"answer"}


@pytest.mark.parametrize("tools", [TOOLS, STRICT])
async def test_a_chat_with_a_schema_calls_a_tool_or_follows_it(
    client: httpx.AsyncClient, tools: Any
) -> None:
    called = await chat(client, WEATHER, response_format=FORMAT, tools=tools)
    assert called["finish_reason"] == "tool_calls"
    (call,) = called["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert not called["message"]["content"]
    answered = await chat(client, NO_TOOL, response_format=FORMAT, tools=tools, **NO_CALL)
    assert answered["finish_reason"] == "stop"
    assert is_answer(answered["message"]["content"])


@pytest.mark.parametrize(
    ("outputs", "fits"),
    [
        ({"json": ANSWER}, is_answer),
        ({"regex": "[0-9]{2}"}, str.isdecimal),
        ({"choice": ["yes", "no"]}, {"yes", "no"}.__contains__),
        ({"grammar": 'root ::= "yes" | "no"'}, {"yes", "no"}.__contains__),
        ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    ],
    ids=["json", "regex", "choice", "grammar", "json_object"],
)
async def test_structured_outputs_leave_room_for_calls(
    client: httpx.AsyncClient, outputs: Any, fits: Any
) -> None:
    called = await chat(client, WEATHER, structured_outputs=outputs)
    assert called["finish_reason"] == "tool_calls"
    fields = {**NO_CALL, "max_tokens": 200}
    answered = await chat(client, NO_TOOL, structured_outputs=outputs, **fields)
    assert fits(answered["message"]["content"])


async def test_responses_with_a_schema_call_tools(client: httpx.AsyncClient) -> None:
    fields = {
        "tools": [{"type": "function", **FUNCTION}],
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": ANSWER}},
        "max_output_tokens": 60,
        "store": False,
    }
    called = await post(client, "/v1/responses", input=WEATHER, **fields)
    assert [item["type"] for item in called["output"]] == ["function_call"]
    answered = await post(client, "/v1/responses", input=NO_TOOL, **fields, **NO_CALL)
    assert is_answer(answered["output"][0]["content"][0]["text"])


async def test_messages_with_a_schema_call_tools(client: httpx.AsyncClient) -> None:
    tool = {"name": "get_weather", "description": "The weather in a city", "input_schema": CITY}
    fields = {
        "tools": [tool],
        "output_config": {"format": {"type": "json_schema", "schema": ANSWER}},
        "max_tokens": 60,
    }
    called = await post(client, "/v1/messages", messages=user(WEATHER), **fields)
    assert [block["type"] for block in called["content"]] == ["tool_use"]


async def test_ollamas_format_leaves_room_for_calls(client: httpx.AsyncClient) -> None:
    fields = {"tools": TOOLS, "format": ANSWER, "stream": False}
    called = (await post(client, "/api/chat", messages=user(WEATHER), **fields))["message"]
    assert [each["function"]["name"] for each in called["tool_calls"]] == ["get_weather"]


async def test_a_regular_expression_binds_the_input_of_a_custom_tool_in_a_namespace(
    client: httpx.AsyncClient,
) -> None:
    wanted = r'"[a-c]{2}\\\n(é|\$x|\t)"'
    shape = {"type": "grammar", "syntax": "regex", "definition": wanted}
    space = {
        "type": "namespace",
        "name": "files",
        "tools": [{"type": "custom", "name": "patch", "format": shape}],
    }
    for choice in ("required", {"type": "custom", "name": "patch", "namespace": "files"}):
        answer = await post(
            client,
            "/v1/responses",
            input=WEATHER,
            tools=[space],
            tool_choice=choice,
            parallel_tool_calls=False,
        )
        (call,) = answer["output"]
        assert call["type"] == "custom_tool_call"
        assert (call["namespace"], call["name"]) == ("files", "patch")
        assert re.fullmatch(wanted, call["input"])


LARK = """
start: "PATCH\\n" line+ "\\"END\\\\"
line: "+" WORD LF
%import common.WORD
%import common.LF
%ignore " "
"""
PATCH = re.compile(r' *PATCH\n *(\+ *[A-Za-z]+ *\n *)+"END\\ *')
CUSTOM: dict[str, Any] = {
    "type": "custom",
    "name": "get_weather",
    "description": "The weather in a city",
    "format": {"type": "grammar", "syntax": "lark", "definition": LARK},
}


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "custom", "name": "get_weather"}])
async def test_a_lark_grammar_binds_the_input_of_a_custom_tool(
    client: httpx.AsyncClient, choice: Any
) -> None:
    fields = {"tools": [CUSTOM], "tool_choice": choice, "temperature": 1, "seed": 3}
    body = {"model": "demo", "input": WEATHER, "parallel_tool_calls": False, **fields}
    response = await client.post("/v1/responses", json=body)
    assert "X-TokenMesh-Warning" not in response.headers
    (call,) = response.json()["output"]
    assert call["type"] == "custom_tool_call"
    if response.json()["status"] == "completed":
        assert PATCH.fullmatch(call["input"]), call["input"]
    streamed = await client.post("/v1/responses", json={**body, "stream": True})
    assert json.dumps(call["input"]) in streamed.text


async def test_a_lark_grammar_that_cannot_be_spelled_in_json_is_refused(
    client: httpx.AsyncClient,
) -> None:
    for definition in ("start: <|end|>", "start: x"):
        shape = {**CUSTOM["format"], "definition": definition}
        body = {"model": "demo", "input": WEATHER, "tools": [{**CUSTOM, "format": shape}]}
        response = await client.post("/v1/responses", json=body)
        assert response.status_code == 400
        assert "tools" in response.json()["error"]["message"]


async def test_choices_of_a_lark_grammar_follow_it_each(client: httpx.AsyncClient) -> None:
    grammar = {"grammar": 'start: A "\\n" B\nA: /[a-f]{2,4}/\nB: /[0-9]+/ & /.{3}/'}
    body: dict[str, Any] = {"model": "demo", "messages": user(WEATHER)}
    body["structured_outputs"] = grammar
    body |= {"n": 3, "temperature": 2, "seed": 1}
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert all(re.fullmatch("[a-f]{2,4}\n[0-9]{3}", text) for text in texts)
    async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as sent:
        lines = [line[6:] async for line in sent.aiter_lines() if line.startswith("data: {")]
    joined = ["", "", ""]
    for chunk in map(json.loads, lines):
        for choice in chunk["choices"]:
            joined[choice["index"]] += choice["delta"].get("content") or ""
    assert joined == texts
