"""Chunks, token ids and usage have the shapes that vLLM's clients rely on."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.fakes.back_end import MAX_MODEL_LEN, BackEnd, fake_tokenizer
from tests.servers import Server, bus_settings_of, redis_settings_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, PLAIN, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
USAGE = {"include_usage": True, "continuous_usage_stats": True}
TALK = [{"role": "user", "content": "Hi"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(nats_server: Server, redis_server: Server) -> AsyncIterator[BackEnd]:
    async with BackEnd(bus_settings_of(nats_server), redis_settings_of(redis_server)) as back_end:
        yield back_end


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: BackEnd) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=10) as http:
        yield http


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": True}, {"stream_options": USAGE}, {"return_token_ids": True}]
)
async def test_the_chunk_of_the_last_token_has_the_finish_reason(
    mesh: BackEnd, client: httpx.AsyncClient, fields: dict[str, Any], n: int
) -> None:
    body = {"model": mesh.model, "messages": TALK, "max_tokens": 3, "n": n, **fields}
    answer = await events(client, CHAT, body)
    for index in range(n):
        mine = [choice for each in answer for choice in each["choices"] if choice["index"] == index]
        assert [choice["finish_reason"] for choice in mine] == [None, None, None, "length"]
        assert all(choice["delta"]["content"] for choice in mine[1:])
        if "logprobs" in fields:
            assert [len(choice["logprobs"]["content"]) for choice in mine[1:]] == [1, 1, 1]


async def test_the_running_usage_rises_with_every_chunk(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    body = {"model": mesh.model, "messages": TALK, "max_tokens": 100, "stream_options": USAGE}
    answer = await events(client, CHAT, body)
    counts = [each["usage"]["completion_tokens"] for each in answer if each["choices"]]
    assert counts == list(range(len(counts)))
    assert answer[-1]["choices"] == []
    assert answer[-1]["usage"]["completion_tokens"] == counts[-1]


async def test_text_held_back_for_a_stop_string_leaves_a_last_chunk_without_text(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    body = {"model": mesh.model, "messages": TALK, "max_tokens": 100, "stop": ["the mesh"]}
    answer = await events(client, CHAT, body)
    choices = [choice for each in answer for choice in each["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "Hello from "
    assert [choice["finish_reason"] for choice in choices].count("stop") == 1
    assert choices[-1] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": "the mesh",
    }


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_ids_of_an_echoed_completion_are_the_generated_ones(
    mesh: BackEnd, client: httpx.AsyncClient, is_stream: bool
) -> None:
    body = {"model": mesh.model, "prompt": "One", "echo": True, "return_token_ids": True}
    ids: list[int] = []
    if is_stream:
        choices = [each["choices"][0] for each in await events(client, PLAIN, body)]
    else:
        choices = [(await client.post(PLAIN, json=body)).json()["choices"][0]]
    for choice in choices:
        ids += choice["token_ids"]
    text = "".join(choice["text"] for choice in choices)
    prompt = [choice["prompt_token_ids"] for choice in choices if choice.get("prompt_token_ids")]
    assert prompt == [fake_tokenizer().encode("One").ids]
    assert text == "One" + fake_tokenizer().decode(ids)


@pytest.mark.parametrize("num_words", [1, 40])
async def test_a_message_counts_the_blocks_that_its_prompt_added_to_the_cache(
    mesh: BackEnd, client: httpx.AsyncClient, num_words: int
) -> None:
    talk = [{"role": "user", "content": "word " * num_words}]
    body = {"model": mesh.model, "messages": talk, "max_tokens": 20}
    whole = (await client.post(MESSAGES, json=body)).json()["usage"]
    answer = await events(client, MESSAGES, body)
    begun, ended = answer[0]["message"]["usage"], answer[-2]["usage"]
    asked = {"model": mesh.model, "messages": talk}
    count = (await client.post(f"{MESSAGES}/count_tokens", json=asked)).json()["input_tokens"]
    read, written = whole["cache_read_input_tokens"], whole["cache_creation_input_tokens"]
    assert count < MAX_MODEL_LEN
    assert written == count // 16 * 16 - read
    assert whole["input_tokens"] == count - read - written
    assert begun == {**whole, "output_tokens": 0}
    assert ended == whole
