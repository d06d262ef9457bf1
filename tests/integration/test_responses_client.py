"""client.responses of the openai Python client, unchanged, against a real gateway with fakes."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tests.fakes.back_end import MAX_MODEL_LEN, BackEnd, saying
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.failed import to_failed
from tokenmesh.shared.tokens import unpack_ids

TEXT = "Hello from the mesh, na\u00efve caf\u00e9!"
LONG = "abcdefgh" * 20
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


@pytest.fixture
async def long_mesh(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> AsyncIterator[BackEnd]:
    async with BackEnd(bus_settings, redis_settings, saying(LONG)) as back_end:
        yield back_end


@pytest.fixture
async def client(mesh: BackEnd) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=10
    ) as connected:
        yield connected


async def stream_events(mesh: BackEnd, **fields: Any) -> list[dict[str, Any]]:
    """The events as they are on the wire, each checked against the client's types."""
    body = {"model": mesh.model, "input": "Hi", "stream": True, "store": False, **fields}
    async with httpx.AsyncClient(timeout=10) as http:
        answer = await http.post(f"{mesh.url}/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for frame in answer.text.strip().split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_json(data.removeprefix("data: "))
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_a_response(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(
        model=mesh.model,
        input="Hi",
        instructions="Be kind",
        metadata={"a": "b"},
        max_output_tokens=50,
        temperature=0.5,
        store=False,
    )
    assert answer.output_text == TEXT
    assert (answer.status, answer.object, answer.model) == ("completed", "response", mesh.model)
    assert answer.id.startswith("resp_")
    assert answer._request_id == answer.id
    assert (answer.instructions, answer.metadata) == ("Be kind", {"a": "b"})
    assert (answer.temperature, answer.max_output_tokens) == (0.5, 50)
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.usage.output_tokens > 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    Response.model_validate(answer.model_dump(by_alias=True))


async def test_a_stream(mesh: BackEnd) -> None:
    events = await stream_events(mesh)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert "".join(event["delta"] for event in events[4:-4]) == TEXT
    assert events[0]["response"]["output"] == []
    final = events[-1]["response"]
    assert final["output"][0] == events[-2]["item"]
    assert final["output"][0]["content"][0]["text"] == TEXT
    assert final["usage"]["output_tokens"] > 1


async def test_the_same_streamed_and_whole(mesh: BackEnd) -> None:
    streamed = (await stream_events(mesh))[-1]["response"]
    async with httpx.AsyncClient(timeout=10) as http:
        body = {"model": mesh.model, "input": "Hi", "store": False}
        whole = (await http.post(f"{mesh.url}/v1/responses", json=body)).json()
    assert streamed.keys() == whole.keys()
    for each in (streamed, whole):
        each["output"][0].pop("id")
    differing = {"id", "created_at"}
    assert {k: streamed[k] for k in streamed if k not in differing} == {
        k: whole[k] for k in whole if k not in differing
    }


async def test_the_stream_helper(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model=mesh.model, input="Hi", store=False) as stream:
        text = "".join(
            [event.delta async for event in stream if event.type == "response.output_text.delta"]
        )
        final = await stream.get_final_response()
    assert text == final.output_text == TEXT


def _use_blocking_client(url: str, model: str) -> list[str]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        whole = client.responses.create(model=model, input="Hi", store=False)
        with client.responses.stream(model=model, input="Hi", store=False) as stream:
            stream.until_done()
            final = stream.get_final_response()
    return [whole.output_text, final.output_text]


async def test_the_blocking_client(mesh: BackEnd) -> None:
    reported = await asyncio.to_thread(_use_blocking_client, mesh.url, mesh.model)
    assert reported == [TEXT, TEXT]


async def test_a_response_that_is_cut_is_incomplete(mesh: BackEnd) -> None:
    events = await stream_events(mesh, max_output_tokens=3)
    assert events[-1]["type"] == "response.incomplete"
    final = events[-1]["response"]
    assert final["status"] == "incomplete"
    assert final["incomplete_details"] == {"reason": "max_output_tokens"}
    assert final["output"][0]["status"] == "incomplete"
    assert final["usage"]["output_tokens"] == 3


async def test_log_probabilities(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    requested: Any = {
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "store": False,
    }
    answer = await client.responses.create(model=mesh.model, input="Hi", **requested)
    content = answer.output[0].content[0]
    assert content.type == "output_text"
    assert content.logprobs is not None
    spelled = b"".join(bytes(entry.bytes) for entry in content.logprobs)
    assert spelled.decode() == TEXT
    events = await stream_events(mesh, **requested)
    reported = [event["logprobs"] for event in events if event["type"].endswith("text.delta")]
    assert [each["token"] for entries in reported for each in entries] == [
        each.token for each in content.logprobs
    ]


@pytest.mark.parametrize("store", [True, False])
async def test_response_messages_show_the_tokens(mesh: BackEnd, store: bool) -> None:
    events = await stream_events(mesh, enable_response_messages=True, store=store)
    final = events[-1]["response"]
    assert final["input_messages"][0]["message"] == 'user: "Hi"\nassistant: '
    assert final["output_messages"][0]["message"] == f"{TEXT}<|im_end|>"
    generate = mesh.workers[0].generates[-1]
    assert final["input_messages"][0]["tokens"] == unpack_ids(generate.prompt_ids)


async def test_an_error_before_the_first_token_has_its_status(
    mesh: BackEnd, client: openai.AsyncOpenAI
) -> None:
    mesh.scheduler.is_full = True
    with pytest.raises(openai.RateLimitError):
        await client.responses.create(model=mesh.model, input="Hi", stream=True)


async def test_a_template_error_names_the_client_s_field(mesh: BackEnd) -> None:
    async with httpx.AsyncClient(timeout=10) as http:
        body = {"model": mesh.model, "input": "broken template", "store": False}
        answer = await http.post(f"{mesh.url}/v1/responses", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template"


async def test_an_error_in_mid_stream_is_an_event_and_ends_the_response(long_mesh: BackEnd) -> None:
    worker = long_mesh.workers[0]

    async def fail_later() -> None:
        await long_mesh.until(lambda: worker.num_messages > 5)
        worker.faults.fails_with = to_failed(InvalidInput("the tensor is broken"))

    later = asyncio.create_task(fail_later())
    events = await stream_events(long_mesh)
    await later
    kinds = [event["type"] for event in events]
    assert kinds[-3:] == ["response.output_item.done", "error", "response.failed"]
    assert events[-2]["message"] == "the tensor is broken"
    final = events[-1]["response"]
    assert (final["status"], final["error"]["code"]) == ("failed", "invalid_prompt")
    assert final["output"][0]["status"] == "incomplete"
    said = final["output"][0]["content"][0]["text"]
    assert said
    assert LONG.startswith(said)


async def test_a_client_that_leaves_cancels_its_response(long_mesh: BackEnd) -> None:
    body = {"model": long_mesh.model, "input": "Hi", "stream": True, "store": False}
    async with (
        httpx.AsyncClient(timeout=10) as http,
        http.stream("POST", f"{long_mesh.url}/v1/responses", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if "output_text.delta" in line:
                break
    await long_mesh.until(lambda: len(long_mesh.workers[0].cancels) > 0)


async def test_a_long_input_is_cut_only_with_truncation_auto(mesh: BackEnd) -> None:
    body = {"model": mesh.model, "input": "word " * 400, "store": False, "max_output_tokens": 40}
    async with httpx.AsyncClient(timeout=10) as http:
        refused = await http.post(f"{mesh.url}/v1/responses", json=body)
        cut = await http.post(f"{mesh.url}/v1/responses", json={**body, "truncation": "auto"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "input"
    assert "messages" not in refused.json()["error"]["message"]
    assert cut.status_code == 200, cut.text
    assert cut.json()["usage"]["input_tokens"] == MAX_MODEL_LEN - 40
    assert cut.json()["truncation"] == "auto"


async def test_an_error_after_a_keep_alive_is_a_whole_stream(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    limits: dict[str, Any] = {"sse_keep_alive_s": 0.05, "request_timeout_s": 0.5}
    async with BackEnd(bus_settings, redis_settings, **limits) as mesh:
        mesh.scheduler.delay_s = 2.0
        body = {"model": mesh.model, "input": "Hi", "stream": True, "store": False}
        async with httpx.AsyncClient(timeout=10) as http:
            answer = await http.post(f"{mesh.url}/v1/responses", json=body)
    events = [
        json.loads(line.removeprefix("data: "))
        for line in answer.text.splitlines()
        if line.startswith("data: ")
    ]
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "error",
        "response.failed",
    ]
    assert events[-1]["response"]["error"]["code"] == "server_error"
    for event in events:
        EVENT.validate_json(json.dumps(event))


class Greeting(pydantic.BaseModel):
    hello: str


async def test_parsing_into_a_model(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    mesh.workers[0].script = saying('{"hello": "you"}')
    requested: Any = {"model": mesh.model, "input": "Hi", "text_format": Greeting, "store": False}
    answer = await client.responses.parse(**requested)
    assert answer.output_parsed == Greeting(hello="you")
    async with client.responses.stream(**requested) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == Greeting(hello="you")
    structured = mesh.workers[0].generates[-1].sampling.structured
    assert structured is not None
    assert final.text is not None
    assert final.text.format is not None
    assert final.text.format.type == "json_schema"
