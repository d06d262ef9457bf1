"""The anthropic client and realtime sessions with the demo model: text, thinking, tools, JSON."""

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pydantic
import pytest

from tests.e2e.mesh_process import MeshProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

MODEL = "tokenmesh-demo"
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the weather in a city",
    "input_schema": SCHEMA,
}


@pytest.fixture(scope="module")
def client(demo_mesh: MeshProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=demo_mesh.url, api_key="none", max_retries=0, timeout=60
    ) as connected:
        yield connected


def request_of(text: str, **fields: Any) -> Any:
    body = fields.pop("extra_body", {}) | {"temperature": 0}
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "max_tokens": 200, "messages": messages, "extra_body": body} | fields


def test_text_streamed_and_whole(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**request_of("What is 17 + 25?"))
    assert whole.content[0].type == "text"
    assert "42" in whole.content[0].text
    with client.messages.stream(**request_of("What is 17 + 25?")) as stream:
        assert stream.get_final_text() == whole.content[0].text


def test_thinking_is_a_block_of_its_own(client: anthropic.Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 100}
    with client.messages.stream(**request_of("What is 17 + 25?", thinking=thinking)) as stream:
        first, second = stream.get_final_message().content
    assert first.type == "thinking"
    assert first.thinking
    assert "<think>" not in first.thinking
    assert second.type == "text"
    assert "42" in second.text
    off = client.messages.create(**request_of("What is 17 + 25?", thinking={"type": "disabled"}))
    assert [block.type for block in off.content] == ["text"]


def test_a_tool_and_its_result(client: anthropic.Anthropic) -> None:
    question = request_of("What is the weather in Paris?", tools=[WEATHER])
    message = client.messages.create(**question)
    call = message.content[-1]
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    assert message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees, sunny"}
    turns = [*question["messages"], message.to_param(), {"role": "user", "content": [result]}]
    answer = client.messages.create(**question | {"messages": turns})
    assert answer.content[0].type == "text"
    assert "18" in answer.content[0].text


def test_a_tool_that_must_be_used(client: anthropic.Anthropic) -> None:
    choice: Any = {"type": "tool", "name": "get_weather"}
    message = client.messages.create(**request_of("Hello", tools=[WEATHER], tool_choice=choice))
    call = message.content[-1]
    assert call.type == "tool_use"
    assert call.input.keys() == {"city"}


def test_structured_output(client: anthropic.Anthropic) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = client.messages.create(**request_of("Where?", output_config=config))
    assert message.content[0].type == "text"
    assert json.loads(message.content[0].text).keys() == {"city"}


class Place(pydantic.BaseModel):
    city: str


def test_parsed_output(client: anthropic.Anthropic) -> None:
    question = request_of("Where?")
    assert isinstance(client.messages.parse(**question, output_format=Place).parsed_output, Place)
    with client.messages.stream(**question, output_format=Place) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Place)


def test_counting_tokens(client: anthropic.Anthropic) -> None:
    question = request_of("What is the weather in Paris?")
    del question["max_tokens"], question["extra_body"]
    plain = client.messages.count_tokens(**question).input_tokens
    with_tools = client.messages.count_tokens(**question, tools=[WEATHER]).input_tokens
    assert 0 < plain < with_tools


@pytest.mark.filterwarnings("ignore:connect")
def test_a_realtime_session(demo_mesh: MeshProcess) -> None:
    url = demo_mesh.url + "/v1"
    tool: Any = {"type": "function", "parameters": SCHEMA, "name": "get_weather"}
    with (
        openai.OpenAI(base_url=url, api_key="none", websocket_base_url=url) as client,
        client.realtime.connect(model=MODEL) as session,
    ):
        settings: Any = {"type": "realtime", "tools": [tool], "temperature": 0}
        session.session.update(session=settings)
        content: Any = [{"type": "input_text", "text": "What is the weather in Paris?"}]
        session.conversation.item.create(
            item={"type": "message", "role": "user", "content": content}
        )
        session.response.create()
        call = _done(session).output[-1]
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
        output: Any = {"type": "function_call_output", "call_id": call.call_id}
        session.conversation.item.create(item=output | {"output": "18 degrees, sunny"})
        session.response.create()
        final = _done(session)
        assert "18" in final.output[0].content[0].text
    spans = {span["name"]: span for span in _trace(demo_mesh.url, final.id)}
    opened, answered = spans["realtime_session"], spans["realtime_response"]
    assert answered["parent_id"] == opened["span_id"]
    assert {"tokenize", "place", "generate", "worker.decode"} <= spans.keys()


def _trace(url: str, key: str) -> list[Any]:
    """The spans of a trace, once the session's, which ends last, has arrived."""
    give_up_s = time.monotonic() + 15
    while time.monotonic() < give_up_s:
        answer = httpx.get(f"{url}/traces/{key}")
        spans = answer.json()["spans"] if answer.status_code == 200 else []
        if {"realtime_session", "worker.decode"} <= {span["name"] for span in spans}:
            return list(spans)
        time.sleep(0.2)
    raise AssertionError(answer.text)


def _done(session: Any) -> Any:
    for event in session:
        assert event.type != "error", event
        if event.type == "response.done":
            return event.response
    raise AssertionError("the session ended")
