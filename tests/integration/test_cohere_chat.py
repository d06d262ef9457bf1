"""Cohere's chats through a real gateway: whole and streamed, tools, errors, render."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.fakes.back_end import BackEnd, eos_id, fake_tokenizer
from tests.fakes.three_calls import announce_tokenizer
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages import Generate
from tokenmesh.shared.messages.failed import to_failed
from tokenmesh.shared.tokens import unpack_ids

CHAT = "/cohere/v2/chat"
THOUGHT = "Hm."
CALL = '<tool_call>{"name":"f","arguments":{"at":"sky"}}</tool_call>'
SPOKEN = f"<think>{THOUGHT}</think>\n\nLook.\n"
TOOL: Any = {
    "type": "function",
    "function": {"name": "f", "description": "Looks.", "parameters": {"type": "object"}},
}
MESSAGES: Any = [{"role": "user", "content": "How is it?"}]


def script(generate: Generate) -> list[int]:
    """Reasons and calls a tool until the prompt has a result."""
    tokenizer = fake_tokenizer()
    prompt = tokenizer.decode(unpack_ids(generate.prompt_ids), skip_special_tokens=False)
    text = "It is sunny." if "tool: " in prompt else SPOKEN + CALL
    return [*tokenizer.encode(text).ids, eos_id()]


@pytest.fixture
def is_reasoning_model(request: pytest.FixtureRequest) -> bool:
    """Return the operator's setting."""
    return bool(getattr(request, "param", True))


@pytest.fixture
async def mesh(
    bus_settings: BusSettings, redis_settings: RedisSettings, is_reasoning_model: bool
) -> AsyncIterator[BackEnd]:
    settings: dict[str, Any] = {"scale_out": True}
    settings["cohere_is_reasoning_model"] = is_reasoning_model
    back_end = BackEnd(bus_settings, redis_settings, script, **settings)
    back_end.tokens_per_step = 4
    async with back_end:
        back_end.tokenizer.reasoning_parser = "qwen3"
        back_end.tokenizer.tool_call_parser = "hermes"
        await announce_tokenizer(back_end)
        yield back_end


def asked(mesh: BackEnd, **fields: Any) -> dict[str, Any]:
    return {"model": mesh.model, "messages": MESSAGES, "tools": [TOOL], "max_tokens": 150} | fields


def prompt_of(mesh: BackEnd) -> Any:
    return mesh.tokenizer.received[-1].prompt


async def post(client: httpx.AsyncClient, body: dict[str, Any], path: str = CHAT) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> list[Any]:
    response = await client.post(CHAT, json=body | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def joined(events: list[Any]) -> dict[str, Any]:
    """The message that the events of a stream add up to; each block begins, goes on and ends."""
    message: dict[str, Any] = {"role": "assistant", "content": [], "tool_calls": []}
    is_open = ""
    for event in events:
        kind, phase = event["type"].rsplit("-", 1)
        found = event.get("delta", {}).get("message", {})
        if phase == "start" and kind != "message":
            assert is_open == ""
            is_open = kind
            place = message["content" if kind == "content" else "tool_calls"]
            assert event["index"] == len(place)
            place.append(found["content" if kind == "content" else "tool_calls"])
        elif phase == "delta" and kind == "content":
            for name, text in found["content"].items():
                message["content"][event["index"]][name] += text
        elif phase == "delta" and kind == "tool-call":
            text = found["tool_calls"]["function"]["arguments"]
            message["tool_calls"][event["index"]]["function"]["arguments"] += text
        elif phase == "delta":
            message["tool_plan"] = message.get("tool_plan", "") + found["tool_plan"]
        elif phase == "end" and kind != "message":
            assert is_open == kind
            is_open = ""
    assert is_open == ""
    assert [events[0]["type"], events[-1]["type"]] == ["message-start", "message-end"]
    return {name: value for name, value in message.items() if value}


@pytest.mark.parametrize("path", [CHAT, "/v2/chat"])
async def test_a_round_of_tools(mesh: BackEnd, client: httpx.AsyncClient, path: str) -> None:
    first = await post(client, asked(mesh, k=0, p=0.9, seed=7), path)
    message = first["message"]
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert message["content"][0]["thinking"].strip() == THOUGHT
    [call] = message["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("f", '{"at":"sky"}')
    assert first["finish_reason"] == "TOOL_CALL"
    usage = first["usage"]
    assert usage["tokens"] == usage["billed_units"]
    assert usage["tokens"]["output_tokens"] == len(script(mesh.workers[0].generates[-1]))
    result = {"type": "document", "document": {"id": "d", "data": {"sky": "blåu"}}}
    turns = [
        {"role": "developer", "content": "Be brief."},
        *MESSAGES,
        message,
        {"role": "tool", "tool_call_id": call["id"], "content": [result]},
    ]
    second = await post(client, asked(mesh, messages=turns, max_tokens=60), path)
    assert second["message"]["content"] == [{"type": "text", "text": "It is sunny."}]
    assert second["finish_reason"] == "COMPLETE"
    sent = json.loads(prompt_of(mesh).messages_json)
    assert [each["role"] for each in sent] == ["system", "user", "assistant", "tool"]
    assert sent[2]["reasoning"].strip() == THOUGHT
    assert sent[2]["tool_calls"][0]["id"] == sent[3]["tool_call_id"] == call["id"]
    assert json.loads(sent[3]["content"]) == result["document"]
    assert "blåu" in sent[3]["content"]


@pytest.mark.parametrize("is_reasoning_model", [True, False], indirect=True)
async def test_a_stream_adds_up_to_the_whole_message(
    mesh: BackEnd, client: httpx.AsyncClient, is_reasoning_model: bool
) -> None:
    whole = await post(client, asked(mesh))
    events = await streamed(client, asked(mesh))
    message = joined(events)
    for each in (message, whole["message"]):
        each["tool_calls"][0].pop("id")
    assert message == whole["message"]
    assert ("tool_plan" in message) is not is_reasoning_model
    end = events[-1]["delta"]
    assert (end["finish_reason"], end["usage"]) == ("TOOL_CALL", whole["usage"])
    assert events[0]["id"] == events[-1]["id"]


async def test_log_probabilities_have_ids_and_go_with_the_text(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    messages = [*MESSAGES, {"role": "tool", "tool_call_id": "x", "content": "sunny"}]
    messages.insert(
        1, {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f"}}]}
    )
    body = asked(mesh, messages=messages, logprobs=True)
    whole = await post(client, body)
    assert "".join(each["text"] for each in whole["logprobs"]).startswith("It is sunny.")
    events = await streamed(client, body)
    # What is read once for a model names no trace.
    assert {each.request_id for each in mesh.tokenizer.texts_received} == {""}
    items = [event["logprobs"] for event in events if "logprobs" in event]
    ids = [each for item in items for each in item["token_ids"]]
    assert ids
    assert ids == [each["token_ids"][0] for each in whole["logprobs"]][: len(ids)]
    assert all(len(item["token_ids"]) == len(item["logprobs"]) for item in items)


async def test_what_the_template_reads_is_given_to_it(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    fields = {
        "documents": ["a", {"id": "d", "data": {"title": "t"}}, {"data": "c"}],
        "safety_mode": "STRICT",
        "thinking": {"type": "enabled", "token_budget": 5},
        "citation_options": {"mode": "FAST"},
        "chat_template_kwargs": {"own": 1},
        "response_format": {"type": "json_object", "json_schema": {"type": "object"}},
    }
    response = await client.post(CHAT, json=asked(mesh, tools=None, **fields))
    assert "citation_options ignored" in response.headers["x-tokenmesh-warning"]
    kwargs = json.loads(prompt_of(mesh).template_kwargs_json)
    assert kwargs["safety_mode"] == "strict"
    assert (kwargs["own"], kwargs["enable_thinking"]) == (1, True)
    documents = json.loads(prompt_of(mesh).documents_json)
    assert documents == [{"text": "a"}, {"id": "d", "title": "t"}, {"text": "c"}]
    generate = mesh.workers[0].generates[-1]
    assert generate.sampling.structured is not None


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"tools": None, "tool_choice": "REQUIRED"}, "tool_choice"),
        ({"p": 7}, "p: "),
        ({"stop_sequences": ["x"] * 99}, "stop_sequences"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"documents": [{"data": 1}]}, "documents[0].data"),
        ({"guided_json": {}}, "guided_json"),
        ({"thinking": {"type": "enabled", "token_budget": 0}}, "thinking.token_budget"),
    ],
)
async def test_errors_have_coheres_shape_and_name_its_fields(
    mesh: BackEnd, client: httpx.AsyncClient, fields: dict[str, Any], problem: str
) -> None:
    response = await client.post(CHAT, json=asked(mesh, **fields))
    assert response.status_code == 400
    error = response.json()
    assert error.keys() == {"message", "id"}
    assert error["message"].startswith(problem)


async def test_an_unknown_model_and_path_have_coheres_shape(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    unknown = await client.post(CHAT, json=asked(mesh, model="none"))
    assert (unknown.status_code, unknown.json().keys()) == (404, {"message", "id"})
    lost = await client.post("/cohere/v2/none", json={})
    assert (lost.status_code, lost.json().keys()) == (404, {"message"})


async def test_a_stream_that_fails_ends_with_the_error(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    mesh.tokens_per_step = 1
    lines: list[str] = []
    async with client.stream("POST", CHAT, json=asked(mesh, stream=True)) as response:
        async for line in response.aiter_lines():
            lines += [line] if line else []
            if "content-delta" in line:
                mesh.workers[0].faults.fails_with = to_failed(InvalidInput("no more"))
    assert lines.pop() == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert joined(events)["content"][0]["type"] == "thinking"
    assert events[-1]["delta"] == {"error": "no more", "finish_reason": "ERROR"}


async def test_a_request_is_rendered_as_it_is_answered(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    rendered = await post(client, asked(mesh, k=5, stop_sequences=["x"]), f"{CHAT}/render")
    assert rendered["request_id"].startswith("chatcmpl-")
    sampling = rendered["sampling_params"]
    assert (sampling["top_k"], sampling["stop"], sampling["max_tokens"]) == (5, ["x"], 150)
    await post(client, asked(mesh))
    assert rendered["token_ids"] == unpack_ids(mesh.workers[0].generates[-1].prompt_ids)
