"""Responses of models that reason and call tools, with the real parsers."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from tests.fakes.back_end import BackEnd, saying
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THINKS = "<think>\nLet me see.\n</think>\n\nIt is cold."
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
Servers = tuple[BusSettings, RedisSettings]


@pytest.fixture
async def mesh(bus_settings: BusSettings, redis_settings: RedisSettings) -> AsyncIterator[BackEnd]:
    async with BackEnd(bus_settings, redis_settings, saying(THINKS)) as back_end:
        back_end.tokenizer.reasoning_parser = "qwen3"
        back_end.tokenizer.tool_call_parser = "hermes"
        yield back_end


def client_of(mesh: BackEnd) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=10)


async def ask(mesh: BackEnd, **fields: Any) -> Response:
    async with client_of(mesh) as client:
        requested: Any = {"model": mesh.model, "input": "Hi", "store": False, **fields}
        answer = await client.responses.create(**requested)
    assert isinstance(answer, Response)
    return answer


def say(mesh: BackEnd, text: str) -> None:
    """Set the model's answer."""
    mesh.workers[0].script = saying(text)


async def test_reasoning_is_an_item(mesh: BackEnd) -> None:
    answer = await ask(mesh)
    reasoning, message = answer.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text.strip() == "Let me see."
    assert message.type == "message"
    assert answer.output_text.strip() == "It is cold."
    assert answer.usage is not None
    details = answer.usage.output_tokens_details
    assert 0 < details.reasoning_tokens < answer.usage.output_tokens


async def test_reasoning_can_be_left_out(mesh: BackEnd) -> None:
    answer = await ask(mesh, extra_body={"include_reasoning": False})
    assert [item.type for item in answer.output] == ["message"]
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


async def test_log_probabilities_are_those_of_the_text(mesh: BackEnd) -> None:
    answer = await ask(mesh, include=["message.output_text.logprobs"], top_logprobs=1)
    message = answer.output[-1]
    assert message.type == "message"
    content = message.content[0]
    assert content.type == "output_text"
    spelled = b"".join(bytes(entry.bytes) for entry in content.logprobs or ())
    assert spelled.decode().strip() == "It is cold."


async def test_a_streamed_call(mesh: BackEnd) -> None:
    say(mesh, f"<think>\nHm.\n</think>\n\n{CALL}\n{CALL}")
    async with (
        client_of(mesh) as client,
        client.responses.stream(
            model=mesh.model, input="Hi", tools=[WEATHER], store=False
        ) as stream,
    ):
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "function_call", "function_call"]
    calls = [item for item in final.output if item.type == "function_call"]
    assert len({call.call_id for call in calls}) == len({call.id for call in calls}) == 2
    for call in calls:
        deltas = [
            event.delta
            for event in events
            if event.type == "response.function_call_arguments.delta" and event.item_id == call.id
        ]
        assert "".join(deltas) == call.arguments
        assert json.loads(call.arguments) == {"city": "Oslo"}


async def test_output_can_be_sent_back(mesh: BackEnd) -> None:
    say(mesh, f"<think>\nHm.\n</think>\n\n{CALL}")
    first = await ask(mesh, tools=[WEATHER])
    items: Any = [item.model_dump() for item in first.output]
    result = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "-5"}
    say(mesh, THINKS)
    question = {"role": "user", "content": "How is the weather?"}
    answer = await ask(mesh, input=[question, *items, result], tools=[WEATHER])
    assert answer.output_text.strip() == "It is cold."
    prompt: Any = mesh.tokenizer.received[-1].prompt
    messages = json.loads(prompt.messages_json)
    assert [each["role"] for each in messages] == ["user", "assistant", "tool"]
    assert messages[1]["reasoning"].strip() == "Hm."
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]


async def test_a_custom_tool_is_given_free_text(mesh: BackEnd) -> None:
    say(mesh, '<tool_call>\n{"name": "shell", "arguments": {"input": "ls -l"}}\n</tool_call>')
    answer = await ask(mesh, tools=[{"type": "custom", "name": "shell"}])
    call = answer.output[0]
    assert call.type == "custom_tool_call"
    assert (call.name, call.input) == ("shell", "ls -l")


async def test_harmony(mesh: BackEnd) -> None:
    mesh.tokenizer.reasoning_parser = "openai_gptoss"
    mesh.tokenizer.tool_call_parser = "openai"
    say(
        mesh,
        "<|channel|>analysis<|message|>I should look.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
        '<|message|>{"city": "Oslo"}<|call|>',
    )
    answer = await ask(mesh, tools=[WEATHER])
    reasoning, preamble, call = answer.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "I should look."
    assert preamble.type == "message"
    assert answer.output_text == "Let me look."
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Oslo"}


async def test_tools_that_are_not_allowed_are_not_offered_to_the_model(mesh: BackEnd) -> None:
    say(mesh, CALL)
    answer = await ask(mesh)
    assert [item.type for item in answer.output] == ["message"]
    assert answer.output_text == CALL
    prompt: Any = mesh.tokenizer.received[-1].prompt
    assert prompt.tools_json is None


async def post(mesh: BackEnd, **fields: Any) -> httpx.Response:
    body = {"model": mesh.model, "input": "Hi", "store": False, **fields}
    async with httpx.AsyncClient(timeout=10) as http:
        return await http.post(f"{mesh.url}/v1/responses", json=body)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "no-such-model"}, 404, "model"),
        ({"previous_response_id": "resp_none"}, 404, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_none"}]}, 404, "input[0].id"),
        ({"tools": [{"type": "telepathy"}]}, 400, "tools[0].type"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, 400, "tools[0].name"),
        ({"max_output_tokens": 100000}, 400, "max_output_tokens"),
        ({"stop": ["x"] * 100}, 400, "stop"),
        ({"watermarking": True}, 400, "watermarking"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, 400, "text.format.schema"),
    ],
)
async def test_errors_name_the_clients_field(
    mesh: BackEnd, fields: dict[str, Any], status: int, param: str
) -> None:
    for stream in (False, True):
        answer = await post(mesh, stream=stream, **fields)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["param"] == param


async def test_fields_without_effect_cause_a_warning(mesh: BackEnd) -> None:
    answer = await post(mesh, reasoning={"summary": "auto"}, nonsense=1)
    assert answer.status_code == 200
    reported = " ".join(answer.headers.get_list("x-tokenmesh-warning"))
    assert "nonsense" in reported
    assert "reasoning.summary" in reported
