"""Chats of a model that reasons and calls tools: bodies and streams, over HTTP, with fakes."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.fakes.back_end import BackEnd, fake_tokenizer, saying
from tests.fakes.parsers import PLUGINS
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.messages.tokenize import ChatPrompt

CHAT = "/v1/chat/completions"


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


TOOLS = [function("f", parameters={"type": "object"}), function("g")]


@pytest.fixture
async def mesh(bus_settings: BusSettings, redis_settings: RedisSettings) -> AsyncIterator[BackEnd]:
    back_end = BackEnd(
        bus_settings, redis_settings, saying("<hm>Look{f:ab}{g:c}"), parser_plugins=PLUGINS
    )
    async with back_end:
        back_end.tokenizer.reasoning_parser = "brackets"
        back_end.tokenizer.tool_call_parser = "bracket_calls"
        yield back_end


def body(mesh: BackEnd, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi"}]
    return {"model": mesh.model, "messages": messages, "tools": TOOLS, **fields}


async def post(mesh: BackEnd, client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post(CHAT, json=body(mesh, **fields))
    assert response.status_code == 200, response.text
    return response.json()


async def chunks(mesh: BackEnd, client: httpx.AsyncClient, **fields: Any) -> list[Any]:
    response = await client.post(CHAT, json=body(mesh, stream=True, **fields))
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def prompt_of(mesh: BackEnd) -> ChatPrompt:
    """Return the tokenizer's last prompt."""
    prompt = mesh.tokenizer.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def joined(events: list[Any], index: int = 0) -> dict[str, Any]:
    """Join the deltas of a choice as a client does."""
    whole: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish": None}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            whole["content"] += delta.get("content") or ""
            whole["reasoning"] += delta.get("reasoning") or ""
            for part in delta.get("tool_calls", []):
                call = whole["calls"].setdefault(part["index"], {"arguments": ""})
                call["arguments"] += part["function"]["arguments"]
                call.update({key: part[key] for key in ("id", "type") if key in part})
                call.update({"name": part["function"].get("name", call.get("name"))})
            whole["finish"] = choice["finish_reason"] or whole["finish"]
    return whole


async def test_a_whole_answer(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    answer = await post(mesh, client)
    [choice] = answer["choices"]
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "Look")
    called = [(each["type"], each["function"]) for each in message["tool_calls"]]
    assert called == [
        ("function", {"name": "f", "arguments": "ab"}),
        ("function", {"name": "g", "arguments": "c"}),
    ]
    ids = [each["id"] for each in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(each.startswith("chatcmpl-tool-") for each in ids)
    assert choice["finish_reason"] == "tool_calls"
    details = answer["usage"]["completion_tokens_details"]
    assert 1 <= details["reasoning_tokens"] < answer["usage"]["completion_tokens"]


async def test_a_stream_tells_the_same(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    events = await chunks(mesh, client, stream_options={"include_usage": True})
    whole = joined(events)
    assert (whole["reasoning"], whole["content"], whole["finish"]) == ("hm", "Look", "tool_calls")
    assert [(call["name"], call["arguments"]) for call in whole["calls"].values()] == [
        ("f", "ab"),
        ("g", "c"),
    ]
    assert all(call["type"] == "function" and call["id"] for call in whole["calls"].values())
    answer = await post(mesh, client)
    assert events[-1]["usage"] == answer["usage"]


async def test_each_choice_has_its_own_parser(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    events = await chunks(mesh, client, n=3)
    wholes = [joined(events, index) for index in range(3)]
    assert [whole["reasoning"] for whole in wholes] == ["hm"] * 3
    ids = {call["id"] for whole in wholes for call in whole["calls"].values()}
    assert len(ids) == 6
    answer = await post(mesh, client, n=3)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] % 3 == 0


async def test_logprobs_and_ids_of_all_tokens_are_sent(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    fields = {"logprobs": True, "return_token_ids": True}
    answer = await post(mesh, client, **fields)
    choice = answer["choices"][0]
    num_tokens = answer["usage"]["completion_tokens"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == num_tokens
    events = [event["choices"][0] for event in await chunks(mesh, client, **fields)]
    logprobs_of_chunks = [event["logprobs"] for event in events if event["logprobs"] is not None]
    shown = [each for logprobs in logprobs_of_chunks for each in logprobs["content"]]
    assert [each["token"] for each in shown] == [
        each["token"] for each in choice["logprobs"]["content"]
    ]


async def test_only_calls_leave_no_content(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    mesh.workers[0].script = saying("{f:ab}")
    message = (await post(mesh, client))["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == (None, None)


async def test_reasoning_can_be_left_out(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    answer = await post(mesh, client, include_reasoning=False)
    assert answer["choices"][0]["message"]["reasoning"] is None
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert joined(await chunks(mesh, client, include_reasoning=False))["reasoning"] == ""


async def test_one_call_at_a_time(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    answer = await post(mesh, client, parallel_tool_calls=False)
    names = [each["function"]["name"] for each in answer["choices"][0]["message"]["tool_calls"]]
    assert names == ["f"]
    assert list(joined(await chunks(mesh, client, parallel_tool_calls=False))["calls"]) == [0]


async def test_without_tools_the_template_and_the_parser_know_of_none(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    await post(mesh, client, tool_choice="none")
    assert prompt_of(mesh).tools_json is None
    await post(mesh, client)
    assert json.loads(prompt_of(mesh).tools_json or b"null") == TOOLS


async def test_a_model_without_a_parser_for_its_calls_is_warned_of(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    mesh.tokenizer.reasoning_parser = mesh.tokenizer.tool_call_parser = ""
    response = await client.post(CHAT, json=body(mesh))
    assert "tool_call_parser" in response.headers["x-tokenmesh-warning"]
    message = response.json()["choices"][0]["message"]
    assert message["content"] == "<hm>Look{f:ab}{g:c}"
    assert "tool_calls" not in message


async def test_only_allowed_tools_are_shown(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    await post(mesh, client, tool_choice=choice)
    assert json.loads(prompt_of(mesh).tools_json or b"null") == TOOLS[1:]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_effort": "none"}, ("none", False, False)),
        ({"reasoning_effort": "high"}, ("high", True, True)),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"thinking": False}},
            ("high", None, False),
        ),
    ],
)
async def test_effort_reaches_the_template(
    mesh: BackEnd, client: httpx.AsyncClient, fields: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    await post(mesh, client, **fields)
    shown = json.loads(prompt_of(mesh).template_kwargs_json or b"{}")
    assert (
        shown["reasoning_effort"],
        shown.get("enable_thinking"),
        shown["thinking"],
    ) == expected


NAMED = {"type": "function", "function": {"name": "f"}}


async def test_required_calls_are_read_and_constrained(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    mesh.tokenizer.reasoning_parser = "deepseek_v3"
    mesh.workers[0].script = saying('<think>hm</think>[{"name": "f", "parameters": {"a": 1}}]')
    fields = {"tool_choice": "required", "response_format": {"type": "json_object"}}
    response = await client.post(CHAT, json=body(mesh, **fields))
    assert "response_format" in response.headers["x-tokenmesh-warning"]
    [choice] = response.json()["choices"]
    [called] = choice["message"]["tool_calls"]
    assert called["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert choice["message"]["reasoning"] == "hm"
    constraint = mesh.workers[0].generates[-1].sampling.structured
    assert constraint is not None
    assert (constraint.kind, constraint.field, constraint.after) == ("json", "tools", [])
    whole = joined(await chunks(mesh, client, **fields))
    assert [(each["name"], each["arguments"]) for each in whole["calls"].values()] == [
        ("f", '{"a": 1}')
    ]


async def test_a_named_call_ends_as_openai_has_it(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    mesh.tokenizer.reasoning_parser = "deepseek_v3"
    mesh.workers[0].script = saying('{"a": 1}')
    [choice] = (await post(mesh, client, tool_choice=NAMED))["choices"]
    [called] = choice["message"]["tool_calls"]
    assert called["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert choice["finish_reason"] == "stop"
    whole = joined(await chunks(mesh, client, tool_choice=NAMED))
    assert (whole["finish"], whole["calls"][0]["name"]) == ("stop", "f")


async def test_the_constraint_waits_for_the_end_of_reasoning(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    await post(mesh, client, tool_choice=NAMED, **thinking)
    constraint = mesh.workers[0].generates[-1].sampling.structured
    assert constraint is not None
    [end] = constraint.after
    assert fake_tokenizer().decode(end) == ">"


async def test_a_schema_that_no_grammar_can_be_made_of_is_refused(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#/$defs/missing"}}}
    fields = {"tools": [function("f", parameters=endless)], "tool_choice": NAMED}
    response = await client.post(CHAT, json=body(mesh, **fields))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


async def test_what_a_forced_call_clears_is_not_even_checked(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    broken = {"name": "x", "schema": {"$ref": "#/$defs/missing"}}
    fields = {"response_format": {"type": "json_schema", "json_schema": broken}}
    assert (await client.post(CHAT, json=body(mesh, **fields))).status_code == 400
    await post(mesh, client, tool_choice=NAMED, **fields)


async def test_two_constraints_are_one_too_many(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    fields = {"tool_choice": NAMED, "structured_outputs": {"json_object": True}}
    response = await client.post(CHAT, json=body(mesh, **fields))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "structured_outputs")


BAD_TOOLS: list[dict[str, Any]] = [
    {"tools": [function("f"), function("f")]},
    {"tools": [function("")]},
    {"tools": [function("a b")]},
    {"tools": [function("x" * 129)]},
    {"tools": [function("f", parameters={"type": "string"})]},
    {"tools": [function("f", parameters=[])]},
    {"tools": [function("f", description=7)]},
    {"tools": [function(f"f{index}") for index in range(513)]},
    {"tools": [function("f", description="x" * 1024 * 1024)]},
]
BAD_CHOICES: list[Any] = [
    "sometimes",
    {"type": "custom"},
    {"type": "function"},
    {"type": "function", "function": {"name": "h"}},
    {"type": "allowed_tools"},
    {"type": "allowed_tools", "allowed_tools": {"tools": []}},
    {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": [function("f")]}},
    {"type": "allowed_tools", "allowed_tools": {"tools": [function("h")]}},
]


@pytest.mark.parametrize("fields", BAD_TOOLS)
async def test_bad_tools_are_refused(
    mesh: BackEnd, client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    response = await client.post(CHAT, json=body(mesh, **fields))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools")
    assert error["message"].startswith("tools")


@pytest.mark.parametrize("choice", BAD_CHOICES)
async def test_bad_choices_are_refused(
    mesh: BackEnd, client: httpx.AsyncClient, choice: Any
) -> None:
    response = await client.post(CHAT, json=body(mesh, tool_choice=choice))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tool_choice")
    assert error["message"].startswith("tool_choice")


@pytest.mark.parametrize("fault", ["dies_after", "hangs_after", "breaks_off_after"])
async def test_a_call_outlives_its_worker(
    mesh: BackEnd, client: httpx.AsyncClient, fault: str
) -> None:
    expected = [event["choices"] for event in await chunks(mesh, client)]
    second = await mesh.add_worker()
    setattr(mesh.workers[0].faults, fault, mesh.workers[0].num_messages + 8)
    if fault == "breaks_off_after":
        mesh.workers[0].faults.breaks_off_after = 8
    events = [event["choices"] for event in await chunks(mesh, client, request_id="moved")]
    assert second.generates[0].output_ids
    assert without_ids(events) == without_ids(expected)


def without_ids(events: list[Any]) -> Any:
    """Ids of calls are of the response, and differ."""
    text = json.dumps(events)
    return json.loads(re.sub(r"chatcmpl-tool-\w+", "id", text))


async def test_strict_has_no_effect_where_calls_cannot_be_bound(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    strict = [function("f", strict=True), function("g")]
    answer = await client.post(CHAT, json=body(mesh, tools=strict))
    assert "strict" in answer.headers["x-tokenmesh-warning"]
    assert mesh.workers[0].generates[-1].sampling.structured is None
    wrong = await client.post(CHAT, json=body(mesh, tools=[function("f", strict="yes")]))
    assert wrong.status_code == 400
    assert "tools[0].function.strict" in wrong.json()["error"]["message"]
