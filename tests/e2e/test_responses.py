"""The openai client's Responses API with the demo model: text, reasoning, tools, JSON."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseReasoningItem

from tests.e2e.mesh_process import MeshProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

MODEL = "tokenmesh-demo"
RESULT = "18 degrees, sunny"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
    "strict": True,
}
REQUESTED: Any = {"model": MODEL, "temperature": 0, "store": False}


@pytest.fixture(scope="module")
def client(demo_mesh: MeshProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{demo_mesh.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as connected:
        yield connected


def test_text(client: openai.OpenAI) -> None:
    answer = client.responses.create(input="What is 17 + 25?", **REQUESTED)
    assert "42" in answer.output_text
    assert answer.status == "completed"


def test_reasoning_is_a_separate_item(client: openai.OpenAI) -> None:
    body: Any = {"chat_template_kwargs": {"enable_thinking": True}}
    with client.responses.stream(input="What is 17 + 25?", extra_body=body, **REQUESTED) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.reasoning_text.delta" in kinds
    reasoning, message = final.output
    assert isinstance(reasoning, ResponseReasoningItem)
    assert reasoning.content
    assert "<think>" not in reasoning.content[0].text
    assert message.type == "message"
    assert "42" in final.output_text
    assert final.usage is not None
    assert 0 < final.usage.output_tokens_details.reasoning_tokens < final.usage.output_tokens


def test_a_function_call_and_its_result(client: openai.OpenAI) -> None:
    requested: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = client.responses.create(input=requested, tools=[WEATHER], **REQUESTED)
    call = answer.output[-1]
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, call.status) == ("get_weather", "completed")
    assert json.loads(call.arguments) == {"city": "Paris"}
    items: Any = [item.model_dump(exclude_none=True) for item in answer.output]
    result: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": RESULT,
    }
    reported = client.responses.create(
        input=[*requested, *items, result], tools=[WEATHER], **REQUESTED
    )
    assert "18" in reported.output_text


def test_a_streamed_function_call(client: openai.OpenAI) -> None:
    with client.responses.stream(
        input="What is the weather in Paris?", tools=[WEATHER], **REQUESTED
    ) as stream:
        deltas = [
            event.delta
            for event in stream
            if event.type == "response.function_call_arguments.delta"
        ]
        call = stream.get_final_response().output[-1]
    assert call.type == "function_call"
    assert "".join(deltas) == call.arguments
    assert json.loads(call.arguments) == {"city": "Paris"}


class Sum(pydantic.BaseModel):
    answer: int


def test_structured_text(client: openai.OpenAI) -> None:
    answer = client.responses.parse(input="What is 17 + 25?", text_format=Sum, **REQUESTED)
    assert isinstance(answer.output_parsed, Sum)


def test_a_required_function_is_called(client: openai.OpenAI) -> None:
    chosen: Any = {"type": "function", "name": "get_weather"}
    answer = client.responses.create(
        input="Hello", tools=[WEATHER], tool_choice=chosen, **REQUESTED
    )
    call = answer.output[-1]
    assert isinstance(call, ResponseFunctionToolCall)
    assert json.loads(call.arguments).keys() == {"city"}


def test_a_stored_response_is_continued_by_its_id(client: openai.OpenAI) -> None:
    kept: Any = {**REQUESTED, "store": True}
    requested = "What is the weather in Paris?"
    answer = client.responses.create(input=requested, tools=[WEATHER], **kept)
    call = answer.output[-1]
    assert isinstance(call, ResponseFunctionToolCall)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    reported = client.responses.create(
        input=[result], tools=[WEATHER], previous_response_id=answer.id, **kept
    )
    assert "18" in reported.output_text
    assert client.responses.retrieve(reported.id).output == reported.output
