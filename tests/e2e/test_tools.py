"""Tools and reasoning with the demo model and the openai client, through the whole mesh."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import psutil
import pytest
from pydantic import BaseModel

from tests.e2e.mesh_process import MeshProcess, busiest, cpu_seconds

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

MODEL = "tokenmesh-demo"
QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
TWO_QUESTIONS: Any = [
    {"role": "user", "content": "What is the weather in Paris and what time is it in Rome?"}
]


def tool(name: str, about: str, **parameters: str) -> Any:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    function = {"name": name, "description": about, "parameters": schema}
    return {"type": "function", "function": function}


WEATHER = tool("get_weather", "Get the weather of a city", city="string")
TIME = tool("get_time", "Get the current time in a city", city="string")
MULTIPLY = tool("multiply", "Multiply two numbers", a="number", b="number")
TOOLS: Any = [WEATHER, TIME, MULTIPLY]


@pytest.fixture
def client(demo_mesh: MeshProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_mesh.url}/v1", api_key="none", max_retries=0) as connected:
        yield connected


@pytest.fixture
def async_client(demo_mesh: MeshProcess) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{demo_mesh.url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, messages: Any = QUESTION, **fields: Any) -> Any:
    body = {"model": MODEL, "messages": messages, "tools": TOOLS, "temperature": 0, **fields}
    return client.chat.completions.create(**body).choices[0]


def calls_of(message: Any) -> list[tuple[str, Any]]:
    calls = message.tool_calls or []
    return [(each.function.name, json.loads(each.function.arguments)) for each in calls]


def test_the_model_calls_a_tool(client: openai.OpenAI) -> None:
    choice = ask(client)
    assert calls_of(choice.message) == [("get_weather", {"city": "Paris"})]
    assert choice.message.content is None
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("thinks", [False, True])
def test_a_strict_function_is_called_as_its_schema_says(
    client: openai.OpenAI, thinks: bool
) -> None:
    cities = tool("get_weather", "Get the weather of a city", city="string")
    cities["function"]["parameters"]["properties"]["city"] = {"enum": ["Oslo", "Lima"]}
    thinking = {"chat_template_kwargs": {"enable_thinking": thinks}}
    loose = ask(client, tools=[cities, TIME], extra_body=thinking)
    assert calls_of(loose.message) == [("get_weather", {"city": "Paris"})]
    cities["function"]["strict"] = True
    choice = ask(client, tools=[cities, TIME], extra_body=thinking)
    ((name, arguments),) = calls_of(choice.message)
    assert name == "get_weather"
    assert arguments["city"] in ("Oslo", "Lima")
    assert choice.finish_reason == "tool_calls"


def test_a_strict_function_does_not_have_to_be_called(client: openai.OpenAI) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    choice = ask(client, [{"role": "user", "content": "Hello!"}], tools=[strict])
    assert choice.message.content
    assert not choice.message.tool_calls
    assert choice.finish_reason == "stop"


def test_two_calls_their_results_and_the_answer(client: openai.OpenAI) -> None:
    functions = [("get_weather", '{"city": "Paris"}'), ("get_time", '{"city": "Rome"}')]
    calls = [
        {"id": f"call-{name}", "type": "function", "function": {"name": name, "arguments": text}}
        for name, text in functions
    ]
    results = ['{"temperature": 21, "condition": "sunny"}', '{"time": "14:30"}']
    answers = [
        {"role": "tool", "tool_call_id": call["id"], "content": result}
        for call, result in zip(calls, results, strict=True)
    ]
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    final = ask(client, [*TWO_QUESTIONS, called, *answers])
    assert final.finish_reason == "stop"
    # So small a model repeats one of two results only.
    assert "14:30" in final.message.content


def test_a_call_its_result_and_the_answer(client: openai.OpenAI) -> None:
    message = ask(client).message
    result = {
        "role": "tool",
        "tool_call_id": message.tool_calls[0].id,
        "content": '{"temperature": 21, "condition": "sunny"}',
    }
    final = ask(client, [*QUESTION, message.to_dict(), result])
    assert final.finish_reason == "stop"
    assert "21" in final.message.content


def test_a_model_without_tools_calls_none(client: openai.OpenAI) -> None:
    choice = ask(client, tool_choice="none")
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")


@pytest.mark.parametrize("thinks", [False, True])
def test_required_calls_are_made_and_end(client: openai.OpenAI, thinks: bool) -> None:
    # The prompt gives the model no reason to call, nor to end a list of calls.
    hello = [{"role": "user", "content": "hello"}]
    fields = {
        "temperature": 1.0,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": thinks}},
    }
    for seed in range(3):
        choice = ask(client, hello, tool_choice="required", seed=seed, **fields)
        calls = calls_of(choice.message)
        assert 1 <= len(calls) <= 32
        assert {name for name, _ in calls} <= {"get_weather", "get_time", "multiply"}
        assert choice.finish_reason == "tool_calls"


def test_a_call_can_be_required_where_the_prompt_needs_none(client: openai.OpenAI) -> None:
    hello = [{"role": "user", "content": "hello"}]
    choice = ask(client, hello, tool_choice="required", parallel_tool_calls=False)
    [(name, arguments)] = calls_of(choice.message)
    assert name in {"get_weather", "get_time", "multiply"}
    assert isinstance(arguments, dict)
    assert choice.finish_reason == "tool_calls"


def test_a_named_tool_is_called(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "get_time"}}
    choice = ask(client, tool_choice=named)
    [(name, arguments)] = calls_of(choice.message)
    assert (name, list(arguments)) == ("get_time", ["city"])
    # As at OpenAI and vLLM, because the model had no choice.
    assert choice.finish_reason == "stop"


def test_the_model_thinks_on_request(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    body: Any = {"model": MODEL, "messages": question, "temperature": 0}
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    answer: Any = client.chat.completions.create(**body, extra_body=thinking)
    message = answer.choices[0].message
    assert "17" in message.reasoning
    assert "42" in message.content
    assert "think>" not in message.content
    assert answer.usage.completion_tokens_details.reasoning_tokens > 3
    off: Any = client.chat.completions.create(**body, reasoning_effort="none")
    assert off.choices[0].message.reasoning is None
    assert "42" in off.choices[0].message.content


def test_a_thought_comes_before_a_call(client: openai.OpenAI) -> None:
    choice = ask(client, reasoning_effort="low")
    assert "get_weather" in choice.message.reasoning
    assert calls_of(choice.message) == [("get_weather", {"city": "Paris"})]


def test_a_forced_call_comes_after_the_thought(client: openai.OpenAI) -> None:
    choice = ask(client, tool_choice="required", parallel_tool_calls=False, reasoning_effort="low")
    assert "get_weather" in choice.message.reasoning
    assert calls_of(choice.message) == [("get_weather", {"city": "Paris"})]


def test_the_stream_helper_puts_a_call_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=QUESTION, tools=TOOLS, temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert calls_of(final.message) == [("get_weather", {"city": "Paris"})]
    assert final.finish_reason == "tool_calls"


def test_parse_gives_typed_arguments(client: openai.OpenAI) -> None:
    class GetWeather(BaseModel):
        """Get the weather of a city"""

        city: str

    declared = openai.pydantic_function_tool(GetWeather, name="get_weather")
    answer = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, tools=[declared], temperature=0
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_parse_gives_a_typed_answer(client: openai.OpenAI) -> None:
    class Sky(BaseModel):
        condition: Literal["sunny", "rainy"]
        is_warm: bool

    body: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 100, "temperature": 0}
    answer = client.chat.completions.parse(**body, response_format=Sky)
    assert isinstance(answer.choices[0].message.parsed, Sky)
    with client.chat.completions.stream(**body, response_format=Sky) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed


async def test_the_async_client(async_client: openai.AsyncOpenAI) -> None:
    async with (
        async_client as client,
        client.chat.completions.stream(
            model=MODEL, messages=QUESTION, tools=TOOLS, temperature=0
        ) as stream,
    ):
        final = await stream.get_final_completion()
    assert calls_of(final.choices[0].message) == [("get_weather", {"city": "Paris"})]


def streamed(client: openai.OpenAI, on_chunk: Callable[[int], None]) -> dict[str, str]:
    """A thought and a long list of calls, drawn with one seed: their texts by field and index."""
    stream: Any = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        tools=TOOLS,
        tool_choice="required",
        reasoning_effort="low",
        temperature=0.9,
        seed=5,
        max_tokens=300,
        stream=True,
    )
    texts: dict[str, str] = defaultdict(str)
    for index, chunk in enumerate(stream):
        on_chunk(index)
        delta = chunk.choices[0].delta
        texts["reasoning"] += getattr(delta, "reasoning", "")
        for call in delta.tool_calls or ():
            texts[f"name {call.index}"] += call.function.name or ""
            texts[f"arguments {call.index}"] += call.function.arguments
    return texts


def test_a_constrained_call_goes_on_when_its_worker_is_killed(
    demo_mesh: MeshProcess, client: openai.OpenAI
) -> None:
    workers = demo_mesh.wait_workers(2)
    indices: list[int] = []
    expected = streamed(client, indices.append)
    before = cpu_seconds(workers)
    killed: list[psutil.Process] = []

    def kill_the_busy_one(num_chunks: int) -> None:
        if num_chunks == len(indices) // 2:
            killed.append(busiest(workers, before))
            killed[0].kill()

    assert streamed(client, kill_the_busy_one) == expected
    assert "get_weather" in expected["reasoning"]
    assert list(json.loads(expected["arguments 0"])) == ["city"]
    assert len(workers) == 2
    _, alive = psutil.wait_procs(killed, timeout=5)
    assert alive == []
