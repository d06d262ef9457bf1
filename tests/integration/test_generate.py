"""/inference/v1/generate through a real gateway, with fake workers and mostly no tokenizer."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.fakes.back_end import MAX_MODEL_LEN, BackEnd, eos_id, fake_tokenizer
from tests.fakes.three_calls import GENERATE, announce_tokenizer, events_of
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.tokens import unpack_ids

TEXT = "Hello from the mesh, na\u00efve caf\u00e9!"
ANSWER = [*fake_tokenizer().encode(TEXT).ids, eos_id()]
PROMPT = fake_tokenizer().encode("Once upon").ids
VOCAB = fake_tokenizer().get_vocab_size()
PATHS = (
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/chat/completions/derender",
    "/v1/completions/derender",
    GENERATE,
    "/inference/v1/abort_requests",
)


@pytest.fixture
async def mesh(bus_settings: BusSettings, redis_settings: RedisSettings) -> AsyncIterator[BackEnd]:
    """Without a tokenizer."""
    async with BackEnd(bus_settings, redis_settings, scale_out=True) as back_end:
        await back_end.stop_tokenizer()
        yield back_end


def ask(mesh: BackEnd, fields: dict[str, Any] | None = None, **body: Any) -> dict[str, Any]:
    """`fields`: sampling_params."""
    return {"model": mesh.model, "token_ids": PROMPT, "sampling_params": fields or {}, **body}


def tokens_of(events: list[Any]) -> list[int]:
    return [each for event in events for each in event["choices"][0]["token_ids"]]


async def test_the_routes_are_refused_unless_enabled(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        BackEnd(bus_settings, redis_settings) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        for path in PATHS:
            response = await client.post(path, json={})
            assert response.status_code == 403, path
            assert "Scale-out endpoints are disabled" in response.text
        document = (await client.get("/openapi.json")).json()
        assert not set(PATHS) & set(document["paths"])


async def test_tokens_are_generated_without_a_tokenizer(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    body = ask(mesh, return_token_ids=True, kv_transfer_params={"a": 1}, priority=3)
    response = await client.post(GENERATE, json=body | {"request_id": "r-7", "cache_salt": "s"})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert (answer["request_id"], answer["model"]) == ("r-7", mesh.model)
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (ANSWER, "stop")
    assert "text" not in choice
    assert (answer["output_mode"], answer["kv_transfer_params"]) == ("tokens", {"a": 1})
    assert answer["prompt_token_ids"] == PROMPT
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert answer["usage"]["completion_tokens"] == len(ANSWER)
    answer = mesh.workers[0].generates[0]
    assert (answer.priority, answer.cache_salt, answer.request_id) == (3, "s", "r-7")
    assert unpack_ids(answer.prompt_ids) == PROMPT
    assert answer.sampling.max_tokens == MAX_MODEL_LEN - len(PROMPT)
    assert not mesh.tokenizer.received


async def test_equal_prompts_have_equal_route_hashes(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    ids = [index % 50 + 10 for index in range(150)]
    for salt in (None, None, "other"):
        body = ask(mesh, token_ids=ids, cache_salt=salt)
        assert (await client.post(GENERATE, json=body)).status_code == 200
    first, second, other = (each.route_hashes for each in mesh.scheduler.received)
    assert first == second != other
    assert len(first) == 2 * 8
    assert mesh.workers[0].generates[0].route_head


async def test_a_stream_has_a_chunk_a_choice_and_the_usage_at_its_end(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"n": 2, "logprobs": 1, "prompt_logprobs": 1, "seed": 5}
    body = ask(mesh, fields, stream=True, stream_options=options, return_token_ids=True)
    events = events_of(await client.post(GENERATE, json=body))
    *chunks, last = events
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2 * len(ANSWER)
    assert chunks[0]["prompt_token_ids"] == PROMPT
    assert all("prompt_token_ids" not in each for each in chunks[1:])
    for index in range(2):
        own = [each for each in chunks if each["choices"][0]["index"] == index]
        assert all(len(each["choices"]) == 1 for each in own)
        assert len(own[0]["prompt_logprobs"]) == len(PROMPT)
        assert tokens_of(own) == ANSWER
        entries = [entry for each in own for entry in each["choices"][0]["logprobs"]["content"]]
        assert [each["token_id"] for each in entries] == ANSWER
        assert own[-1]["choices"][0]["finish_reason"] == "stop"
        assert own[-1]["usage"]["completion_tokens"] == len(ANSWER)
    assert [each.sampling.seed for each in mesh.workers[0].generates] == [5, 6]


async def test_a_stream_survives_its_worker_with_the_same_tokens(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    await mesh.add_worker()
    mesh.workers[0].faults.dies_after = 4
    events = events_of(await client.post(GENERATE, json=ask(mesh, stream=True)))
    assert tokens_of(events) == ANSWER
    assert mesh.workers[1].generates[0].attempt == 1


async def test_a_disconnected_client_cancels_its_stream(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    mesh.workers[0].step_s = 0.2
    async with client.stream("POST", GENERATE, json=ask(mesh, stream=True)) as response:
        await anext(response.aiter_lines())
    await mesh.until(lambda: bool(mesh.workers[0].cancels))


async def test_stop_token_ids_end_an_answer(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    answer = await client.post(GENERATE, json=ask(mesh, {"stop_token_ids": [7], "max_tokens": 3}))
    (choice,) = answer.json()["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (ANSWER[:3], "length")
    assert mesh.workers[0].generates[0].sampling.stop_token_ids == [7]


async def test_text_and_stop_strings_need_a_tokenizer(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    wanted = {
        "output_mode": ask(mesh, output_mode="text"),
        "sampling_params.stop": ask(mesh, {"stop": "x"}),
        "sampling_params.bad_words": ask(mesh, {"bad_words": ["x"]}),
        "sampling_params.thinking_token_budget": ask(mesh, {"thinking_token_budget": 4}),
    }
    for param, body in wanted.items():
        response = await client.post(GENERATE, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert "tokenizer" in response.json()["error"]["message"]
    await mesh.start_tokenizer()
    response = await client.post(GENERATE, json=ask(mesh, {"stop": "mesh", "detokenize": False}))
    assert (response.status_code, response.json()["error"]["param"]) == (
        400,
        "sampling_params.stop",
    )
    assert "set detokenize to true" in response.json()["error"]["message"]
    await announce_tokenizer(mesh)
    body = ask(mesh, {"stop": "mesh", "logprobs": 1}, output_mode="text")
    (choice,) = (await client.post(GENERATE, json=body)).json()["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("Hello from the ", "mesh")
    assert "".join(each["token"] for each in choice["logprobs"]["content"]).startswith("Hello")
    streamed = events_of(await client.post(GENERATE, json=body | {"stream": True}))
    assert "".join(each["choices"][0]["text"] for each in streamed) == "Hello from the "


async def test_what_was_rendered_replaces_the_tokenizer(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    thinking = {"num_tokens": 4, "is_open": True, "start_ids": [5], "end_ids": [6]}
    rendered = {
        "bad_words_token_ids": [[3, 4]],
        "reasoning_end_token_ids": [[6]],
        "thinking": thinking,
    }
    fields = {
        "bad_words": ["x"],
        "thinking_token_budget": 4,
        "structured_outputs": {"regex": "a+", "json": None, "_backend": None},
    }
    response = await client.post(GENERATE, json=ask(mesh, fields, rendered=rendered))
    assert response.status_code == 200, response.text
    sampling = mesh.workers[0].generates[0].sampling
    assert sampling.bad_words_ids == [[3, 4]]
    assert sampling.structured is not None
    assert (sampling.structured.text, sampling.structured.after) == ("a+", [[6]])
    assert sampling.thinking is not None
    assert (sampling.thinking.num_tokens, sampling.thinking.end_ids) == (4, [6])


async def test_wrong_requests_name_their_field(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    sequence = {"bad_words_token_ids": [[VOCAB]]}
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("token_ids", ask(mesh, token_ids=[])),
        ("token_ids[0]", ask(mesh, token_ids=[-1])),
        ("token_ids", ask(mesh, token_ids=[VOCAB])),
        ("token_ids", ask(mesh, token_ids=[1] * MAX_MODEL_LEN)),
        ("sampling_params", {"model": mesh.model, "token_ids": PROMPT}),
        ("sampling_params.temperature", ask(mesh, {"temperature": -1})),
        ("sampling_params.logit_bias", ask(mesh, {"logit_bias": {str(VOCAB): 1}})),
        ("sampling_params.stop_token_ids", ask(mesh, {"stop_token_ids": [VOCAB]})),
        ("sampling_params.n", ask(mesh, {"n": 1000})),
        ("sampling_params.extra_args", ask(mesh, {"extra_args": {"a": 1}})),
        ("sampling_params.use_beam_search", ask(mesh, {"use_beam_search": True})),
        ("features", ask(mesh, features={"mm_hashes": {}})),
        ("content_parts", ask(mesh, content_parts=[{"type": "image_url", "url": "http://x"}])),
        ("rendered", ask(mesh, rendered=sequence)),
        ("rendered.thinking.end_ids", ask(mesh, rendered={"thinking": {"num_tokens": 1}})),
    ]
    for param, body in wrong:
        response = await client.post(GENERATE, json=body)
        assert response.status_code == 400, (param, response.text)
        assert response.json()["error"]["param"] == param, response.text
    missing = await client.post(GENERATE, json=ask(mesh, model="no-such-model"))
    assert missing.status_code == 404
    assert not mesh.workers[0].generates


async def test_tokens_only_uses_no_tokenizer(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        BackEnd(bus_settings, redis_settings, tokens_only=True) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        await announce_tokenizer(mesh)
        response = await client.post(GENERATE, json=ask(mesh, {"stop": ["x"]}))
        assert response.json()["error"]["param"] == "sampling_params.stop"
        assert (await client.post(GENERATE, json=ask(mesh))).status_code == 200
        assert not mesh.tokenizer.received
        ready = await client.get("/readyz")
        assert ready.json()["missing"] == ["scheduler"]


async def test_a_response_is_measured(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    assert (await client.post(GENERATE, json=ask(mesh))).status_code == 200
    metrics = mesh.metrics.render().decode()
    assert 'handler="/inference/v1/generate"' in metrics
    assert f'finished_reason="stop",model_name="{mesh.model}"' in metrics


async def test_calls_of_another_origin_are_bounded_as_those_of_render(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    form = {"begin": "<", "end": ">", "schema": '{"title": "' + "a" * 70_000 + '"}'}
    sampling = {"max_tokens": 4, "structured_outputs": {"regex": "a"}}
    body = ask(mesh, sampling, rendered={"calls": {"forms": [form]}})
    response = await client.post(GENERATE, json=body)
    assert response.status_code == 400
    assert "gateway.max_grammar_bytes" in response.json()["error"]["message"]
    assert not mesh.workers[0].generates
