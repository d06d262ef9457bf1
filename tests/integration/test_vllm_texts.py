"""Errors contain the words that vLLM's clients look for; what vLLM accepts is accepted."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.fakes.back_end import MAX_MODEL_LEN, BackEnd
from tests.servers import Server, bus_settings_of, redis_settings_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, PLAIN, MESSAGES, RESPONSES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "responses")
)
TALK = [{"role": "user", "content": "Hi"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(nats_server: Server, redis_server: Server) -> AsyncIterator[BackEnd]:
    async with BackEnd(bus_settings_of(nats_server), redis_settings_of(redis_server)) as back_end:
        yield back_end


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: BackEnd) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=10) as http:
        yield http


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CHAT, {"messages": TALK, "n": 0}, ["greater_than_equal"]),
        (PLAIN, {}, ["Either prompt or prompt_embeds must be provided and non-empty."]),
        (
            PLAIN,
            {"prompt": "", "prompt_embeds": []},
            ["Either prompt or prompt_embeds must be provided and non-empty."],
        ),
        (PLAIN, {"prompt": ""}, ["Either prompt or prompt_embeds must be provided and non-empty."]),
        (PLAIN, {"prompt": [10**6]}, ["out of vocabulary", "1000000"]),
        (CHAT, {"messages": TALK, "allowed_token_ids": [10**6]}, ["out of vocabulary"]),
        (
            CHAT,
            {"messages": TALK, "logit_bias": {"1": 0, "1000000": 1, "x": 1, "9" * 5000: 1}},
            ["1000000, x, 9999", "Vocabulary size: "],
        ),
        (
            RESPONSES,
            {"input": "Hi", "background": True, "store": False},
            ["background can only be used when `store` is true"],
        ),
    ],
)
async def test_a_refusal_has_the_words_of_vllm(
    mesh: BackEnd, client: httpx.AsyncClient, path: str, fields: dict[str, Any], words: list[str]
) -> None:
    response = await client.post(path, json={"model": mesh.model, **fields})
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert all(each in message for each in words), message
    assert len(message) < 400


async def test_an_unknown_response_and_one_that_cannot_be_cancelled(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    unknown = await client.get(f"{RESPONSES}/resp_1234567890")
    assert unknown.status_code == 404
    assert "Response with id 'resp_1234567890' not found." in unknown.json()["error"]["message"]
    made = await client.post(RESPONSES, json={"model": mesh.model, "input": "Hi", "store": True})
    refused = await client.post(f"{RESPONSES}/{made.json()['id']}/cancel")
    assert refused.status_code == 400
    assert "Cannot cancel a synchronous response." in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        (CHAT, {"messages": TALK, "logprobs": "true", "temperature": "0"}, "temperature, logprobs"),
        (PLAIN, {"prompt": "Hi", "max_tokens": "3"}, "max_tokens"),
        (RESPONSES, {"input": "Hi", "temperature": "0.5", "store": "false"}, "store, temperature"),
        (MESSAGES, {"messages": TALK, "max_tokens": "3", "top_p": "1"}, "max_tokens, top_p"),
    ],
)
async def test_numbers_and_booleans_in_strings_are_read_with_a_warning(
    mesh: BackEnd, client: httpx.AsyncClient, path: str, fields: dict[str, Any], names: str
) -> None:
    response = await client.post(path, json={"model": mesh.model, **fields})
    assert response.status_code == 200, response.text
    warning = response.headers["x-tokenmesh-warning"]
    assert warning == f"strings read as numbers or booleans: {names}"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_max_tokens_of_a_message_is_cut_to_what_fits(
    mesh: BackEnd, client: httpx.AsyncClient, is_stream: bool
) -> None:
    body = {"model": mesh.model, "messages": TALK, "max_tokens": 32_000, "stream": is_stream}
    response = await client.post(MESSAGES, json=body)
    assert response.status_code == 200, response.text
    asked = {"model": mesh.model, "messages": TALK}
    counted = await client.post(f"{MESSAGES}/count_tokens", json=asked)
    room = MAX_MODEL_LEN - counted.json()["input_tokens"]
    assert f"max_tokens cut from 32000 to {room}" in response.headers["x-tokenmesh-warning"]
    assert mesh.workers[0].generates[-1].sampling.max_tokens == room


async def test_a_message_without_any_room_and_a_chat_with_too_many_tokens_are_refused(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    long = [{"role": "user", "content": "word " * 1000}]
    full = {"model": mesh.model, "messages": long, "max_tokens": 32_000}
    assert (await client.post(MESSAGES, json=full)).status_code == 400
    chat = {"model": mesh.model, "messages": TALK, "max_tokens": 32_000}
    assert (await client.post(CHAT, json=chat)).status_code == 400
