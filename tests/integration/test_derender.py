"""The derender routes: answers of other servers, forged states, and what is refused."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.fakes.back_end import MAX_MODEL_LEN, BackEnd, eos_id, fake_tokenizer
from tests.fakes.parsers import PLUGINS
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

CHAT = "/v1/chat/completions/derender"
COMPLETION = "/v1/completions/derender"
IDS = fake_tokenizer().encode("Hello caf\u00e9").ids
VOCAB = fake_tokenizer().get_vocab_size()


@pytest.fixture
async def mesh(bus_settings: BusSettings, redis_settings: RedisSettings) -> AsyncIterator[BackEnd]:
    async with BackEnd(
        bus_settings, redis_settings, scale_out=True, parser_plugins=PLUGINS
    ) as back_end:
        yield back_end


def answer(ids: list[int] | None = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "token_ids": IDS if ids is None else ids, **fields}
    return {"request_id": "r-1", "choices": [choice]}


def chunk(ids: list[int], state: Any = None, **fields: Any) -> dict[str, Any]:
    return {"stream": True, "generate_chunk": answer(ids, **fields), "stream_state": state}


async def text_of(client: httpx.AsyncClient, **fields: Any) -> str:
    response = await client.post(CHAT, json={"generate_response": answer(**fields)})
    assert response.status_code == 200, response.text
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


async def test_only_the_token_that_ended_the_answer_is_left_out_of_the_text(
    client: httpx.AsyncClient,
) -> None:
    whole = "Hello caf\u00e9"
    assert await text_of(client) == whole
    assert await text_of(client, finish_reason="stop") == whole
    assert await text_of(client, ids=[*IDS, eos_id()], finish_reason="stop") == whole
    assert await text_of(client, finish_reason="length") == whole
    assert await text_of(client, finish_reason="stop", stop_reason=" ca") == "Hello"
    less = await text_of(client, finish_reason="stop", stop_reason=IDS[-1])
    assert whole.startswith(less)
    assert less != whole


async def test_usage_is_that_of_the_request(client: httpx.AsyncClient) -> None:
    body = {"generate_response": answer(finish_reason="length")}
    answered = (await client.post(CHAT, json=body)).json()
    assert (answered["id"], answered["usage"]["prompt_tokens"]) == ("r-1", 0)
    answered = (await client.post(CHAT, json=body | {"prompt_tokens": 7})).json()
    assert answered["usage"]["total_tokens"] == 7 + len(IDS)
    body["generate_response"]["kv_transfer_params"] = {"a": 1}
    assert (await client.post(CHAT, json=body)).json()["kv_transfer_params"] == {"a": 1}


async def test_a_state_is_small_and_a_forged_one_is_harmless(
    client: httpx.AsyncClient,
) -> None:
    first = (await client.post(COMPLETION, json=chunk(IDS[:2]))).json()
    state = first["stream_state"]
    assert state == {"created": state["created"], "role_sent": True, "output_token_ids": IDS[:2]}
    rest = (await client.post(COMPLETION, json=chunk(IDS[2:], state, finish_reason="stop"))).json()
    texts = [each["chunk"]["choices"][0]["text"] for each in (first, rest)]
    assert "".join(texts) == "Hello caf\u00e9"
    forged = {**state, "output_token_ids": [9] * 50}
    other = await client.post(COMPLETION, json=chunk(IDS[2:], forged))
    assert other.status_code == 200
    bad: list[tuple[str, Any]] = [
        ("stream_state.output_token_ids", {**state, "output_token_ids": [VOCAB]}),
        ("stream_state", {**state, "output_token_ids": [9] * MAX_MODEL_LEN}),
        ("stream_state.created", {**state, "created": -1}),
        ("stream_state.parser", {**state, "parser": "gASV"}),
    ]
    for param, wrong in bad:
        response = await client.post(COMPLETION, json=chunk(IDS[2:], wrong))
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_parser_needs_the_request_and_a_stream_the_prompt(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    mesh.tokenizer.reasoning_parser = "brackets"
    response = await client.post(CHAT, json={"generate_response": answer()})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_request")
    request = {"messages": [{"role": "user", "content": "Hi"}]}
    response = await client.post(CHAT, json=chunk(IDS) | {"chat_request": request})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_token_ids")


async def test_wrong_responses_are_refused_by_name(client: httpx.AsyncClient) -> None:
    entry = {"token_id": IDS[0], "logprob": -1.0, "top_logprobs": []}
    two = {"choices": [{"index": 0, "token_ids": IDS}, {"index": 0, "token_ids": IDS}]}
    wrong: list[tuple[str, str, dict[str, Any]]] = [
        ("generate_response", CHAT, {}),
        ("generate_chunk", CHAT, {"stream": True}),
        ("generate_responses", COMPLETION, {"generate_responses": []}),
        ("choices", CHAT, {"generate_response": {"choices": []}}),
        ("choices", CHAT, {"generate_response": two}),
        ("generate_chunk.choices", CHAT, {"stream": True, "generate_chunk": two}),
        ("token_ids", CHAT, {"generate_response": answer([])}),
        ("token_ids", CHAT, {"generate_response": answer([VOCAB])}),
        ("token_ids", CHAT, {"generate_response": answer([1] * (MAX_MODEL_LEN + 1))}),
        ("prompt_token_ids", CHAT, {"generate_response": answer(), "prompt_token_ids": [VOCAB]}),
        ("logprobs", COMPLETION, {"generate_responses": [answer(logprobs={"content": [entry]})]}),
        (
            "prompt_tokens",
            COMPLETION,
            {"generate_responses": [answer()], "prompt_tokens": [1, 2]},
        ),
        (
            "generate_responses",
            COMPLETION,
            {"generate_responses": [answer()], "completion_request": {"prompt": ["a", "b"]}},
        ),
        (
            "prompt_token_ids",
            COMPLETION,
            {
                "generate_responses": [answer()],
                "completion_request": {"prompt": "a", "echo": True},
            },
        ),
        (
            "generate_response.output_mode",
            CHAT,
            {"generate_response": answer() | {"output_mode": "text"}},
        ),
    ]
    for param, path, body in wrong:
        response = await client.post(path, json=body)
        assert response.status_code == 400, (param, response.text)
        assert response.json()["error"]["param"] == param, response.text


async def test_a_long_answer_leaves_the_event_loop_free(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        BackEnd(bus_settings, redis_settings, scale_out=True, inline_derender_tokens=8) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        threads: list[str] = []
        to_thread = asyncio.to_thread

        async def count(work: Any, *arguments: Any) -> Any:
            threads.append(str(work))
            return await to_thread(work, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio, "to_thread", count)
            assert await text_of(client, ids=IDS[:1])
            assert not [each for each in threads if "Derenderer" in each]
            assert await text_of(client, ids=IDS * 3)
        assert len([each for each in threads if "Derenderer" in each]) == 1


def entry(token_id: int) -> dict[str, Any]:
    top = {"token_id": token_id, "logprob": -1.0, "rank": 1}
    return {"token_id": token_id, "logprob": -1.0, "rank": 1, "top_logprobs": [top]}


async def derendered(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post(CHAT, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("count", [len(IDS), 1])
async def test_log_probabilities_are_shown_where_the_answer_has_them(
    client: httpx.AsyncClient, count: int
) -> None:
    given = answer(logprobs={"content": [entry(each) for each in IDS[:count]]})
    request = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": False}
    for fields in ({}, {"chat_request": request}):
        body = await derendered(client, generate_response=given, **fields)
        [choice] = body["choices"]
        assert [each["logprob"] for each in choice["logprobs"]["content"]] == [-1.0] * count
        assert choice["message"]["content"] == "Hello caf\u00e9"


async def test_a_stop_reason_and_metrics_are_those_of_the_answer(
    client: httpx.AsyncClient,
) -> None:
    given = answer(finish_reason="stop", stop_reason="absent") | {"metrics": {"x": 1.5}}
    body = await derendered(client, generate_response=given)
    assert body["choices"][0]["stop_reason"] == "absent"
    assert body["choices"][0]["message"]["content"] == "Hello caf\u00e9"
    assert body["metrics"] == {"x": 1.5}
    response = await client.post(COMPLETION, json={"generate_responses": [given]})
    assert response.json()["metrics"] == {"x": 1.5}
    response = await client.post(COMPLETION, json={"generate_responses": [given, given]})
    assert "metrics" not in response.json()


async def test_a_parser_that_the_template_alone_suggests_does_not_need_the_request(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    mesh.tokenizer.reasoning_parser = "brackets"
    mesh.tokenizer.detects_parsers = True
    body = await derendered(client, generate_response=answer())
    assert body["choices"][0]["message"]["content"] == "Hello caf\u00e9"


async def test_what_is_too_large_is_named_before_the_request_that_is_missing(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    mesh.tokenizer.reasoning_parser = "brackets"
    long = answer([1] * (MAX_MODEL_LEN + 1))
    response = await client.post(CHAT, json={"generate_response": long})
    assert response.json()["error"]["param"] == "token_ids"
