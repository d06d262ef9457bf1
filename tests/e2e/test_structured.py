"""Structured output with the demo model, through every service as a user runs them."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.e2e.mesh_process import MeshProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

MODEL = "tokenmesh-demo"
REQUEST: Any = {
    "model": MODEL,
    "temperature": 1.0,
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "Give me JSON for a person named Ana, age 31."}],
}


class Person(pydantic.BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def url(demo_mesh: MeshProcess) -> str:
    return f"{demo_mesh.url}/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as connected:
        yield connected


def schema_of(model: type[pydantic.BaseModel]) -> Any:
    schema = {"name": "answer", "schema": model.model_json_schema(), "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def test_the_typed_helper_of_the_openai_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(response_format=Person, seed=1, **REQUEST)
    assert answer.choices[0].message.parsed is not None
    assert answer.choices[0].finish_reason == "stop"


def test_every_choice_follows_the_schema_streamed_or_not(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        response_format=schema_of(Person), n=3, seed=5, **REQUEST
    )
    texts = [choice.message.content or "" for choice in whole.choices]
    assert all(Person.model_validate_json(text) for text in texts)
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(
        response_format=schema_of(Person), n=3, seed=5, stream=True, **REQUEST
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_a_json_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        response_format={"type": "json_object"}, seed=3, **REQUEST
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"choice": ["blue whale", "red fox"]}, "blue whale|red fox"),
        ({"regex": "[A-Z]{3}-[0-9]{4}"}, "[A-Z]{3}-[0-9]{4}"),
        ({"grammar": 'root ::= "<" [a-c]{2,5} ">"'}, "<[a-c]{2,5}>"),
    ],
)
def test_structured_outputs(client: openai.OpenAI, outputs: Any, pattern: str) -> None:
    body = {"structured_outputs": outputs}
    chat = client.chat.completions.create(extra_body=body, seed=2, **REQUEST)
    assert re.fullmatch(pattern, chat.choices[0].message.content or "")
    plain = client.completions.create(
        model=MODEL, prompt="Hi", max_tokens=60, seed=2, extra_body=body
    )
    assert re.fullmatch(pattern, plain.choices[0].text)


def test_thinking_comes_before_the_schema(client: openai.OpenAI) -> None:
    body = {"chat_template_kwargs": {"enable_thinking": True}}
    request = {**REQUEST, "temperature": 0, "max_tokens": 400}
    answer = client.chat.completions.create(
        response_format=schema_of(Person), extra_body=body, **request
    )
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "stop"
    assert message.model_extra is not None
    assert message.model_extra["reasoning"]
    assert Person.model_validate_json(message.content or "")


def test_a_stop_string_ends_it_early(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        response_format=schema_of(Person), stop='"age"', seed=1, **REQUEST
    )
    assert answer.choices[0].finish_reason == "stop"
    assert '"age"' not in (answer.choices[0].message.content or "")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": {"type": "none"}}}, "structured_outputs.json"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "array", "uniqueItems": True}},
                }
            },
            "response_format.json_schema.schema",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_constraint_that_cannot_be_compiled_is_a_bad_request(
    client: openai.OpenAI, fields: Any, param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(extra_body=fields, stream=stream, **REQUEST)
    assert caught.value.param == param
    assert param in caught.value.message


def test_the_engine_goes_on_while_a_hostile_grammar_is_compiled(url: str) -> None:
    asyncio.run(_during_a_hostile_one(url))


async def _during_a_hostile_one(url: str) -> None:
    async with openai.AsyncOpenAI(
        base_url=url, api_key="none", max_retries=0, timeout=60
    ) as client:
        hostile: Any = {"structured_outputs": {"regex": "(([ab]{1,20}){1,20}){1,20}c"}}
        slow = asyncio.create_task(client.chat.completions.create(extra_body=hostile, **REQUEST))
        for _ in range(5):
            answer = await client.chat.completions.create(**{**REQUEST, "max_tokens": 20})
            assert answer.choices[0].message.content
        slow.cancel()


LONG = "([a-z]{9}[0-9]){30}!"


def test_outputs_follow_their_grammar_although_their_worker_is_killed(
    demo_mesh: MeshProcess,
) -> None:
    demo_mesh.wait_workers(2)
    asyncio.run(_kill_a_worker(demo_mesh))


async def _kill_a_worker(running: MeshProcess) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        has_begun = asyncio.Event()
        streams = [asyncio.create_task(_read_long(client, seed, has_begun)) for seed in range(4)]
        await has_begun.wait()
        # each of the two workers computes some of the streams
        running.service("worker").kill()
        for texts in await asyncio.gather(*streams):
            assert all(re.fullmatch(LONG, text) for text in texts)


async def _read_long(client: openai.AsyncOpenAI, seed: int, has_begun: asyncio.Event) -> list[str]:
    """Two choices that take a while."""
    texts = ["", ""]
    body: Any = {"structured_outputs": {"regex": LONG}}
    request = {**REQUEST, "max_tokens": 900, "seed": seed, "n": 2}
    async for chunk in await client.chat.completions.create(
        extra_body=body, stream=True, **request
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        if len(texts[0]) > 20:
            has_begun.set()
    return texts
