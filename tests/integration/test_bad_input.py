"""Bad input over HTTP: a clear error that names the field, and the gateway keeps serving."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.fakes.back_end import BackEnd
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
MEBIBYTE = 1024 * 1024


async def check(
    mesh: BackEnd, client: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    """The fields are refused by name, and the next request is served."""
    own = {"prompt": "Hi"} if path == PLAIN else {"messages": [{"role": "user", "content": "Hi"}]}
    body = {"model": mesh.model, **own}
    response = await client.post(path, json={**body, **fields})
    assert response.status_code == 400, (fields, response.text)
    error = response.json()["error"]
    assert error["param"] == param, (fields, error)
    assert param.partition("[")[0].partition(".")[0] in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (await client.post(path, json=body)).status_code == 200


Cases = list[tuple[dict[str, Any], str]]

COMMON: Cases = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": 10**30}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"min_tokens": 10, "max_tokens": 5}, "min_tokens"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"stop": ["x"] * 10_000}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x" * 1000]}, "stop"),
    ({"stop": 7}, "stop"),
    ({"stop": ["a", 7]}, "stop[1]"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 2000}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {str(index): 1 for index in range(2000)}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [99_999]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["a", "w" * 65_536]}, "bad_words"),
    ({"prompt_logprobs": 1000}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"logprob_token_ids": []}, "logprob_token_ids"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"logprob_token_ids": [-1]}, "logprob_token_ids[0]"),
    ({"logprob_token_ids": "1"}, "logprob_token_ids"),
    ({"repetition_detection": 3}, "repetition_detection"),
    ({"repetition_detection": {"max": 3}}, "repetition_detection.max"),
    (
        {"repetition_detection": {"max_pattern_size": 3}},
        "repetition_detection.min_count",
    ),
    (
        {"repetition_detection": {"max_pattern_size": 10**6, "min_count": 2}},
        "repetition_detection.max_pattern_size",
    ),
    (
        {"repetition_detection": {"max_pattern_size": 1, "min_pattern_size": 2}},
        "repetition_detection.min_pattern_size",
    ),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stream": "maybe"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncation_side": "top"}, "truncation_side"),
    ({"stream_interval": 0}, "stream_interval"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"priority": "high"}, "priority"),
    ({"priority": 10**12}, "priority"),
    ({"bad_words": "no"}, "bad_words"),
    ({"echo": "maybe"}, "echo"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"return_tokens_as_token_ids": "maybe"}, "return_tokens_as_token_ids"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"request_id": "x" * 1000}, "request_id"),
    ({"request_id": "a\u001fb"}, "request_id"),
    ({"request_id": "caf\u00e9"}, "request_id"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a" * 10_000}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"thinking_token_budget": "long"}, "thinking_token_budget"),
    ({"session_id": "x" * 1000}, "session_id"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ({"watermarking": {"a": 1}}, "watermarking"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
]
CHAT_ONLY: Cases = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"prediction": "text"}, "prediction"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    ({"prediction": {"type": "text", "content": "a"}}, "prediction.type"),
    ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
    ({"logprobs": True, "top_logprobs": 100}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": True, "logprob_token_ids": [10**6]}, "logprob_token_ids"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"reasoning_effort": "lots"}, "reasoning_effort"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
]
PLAIN_ONLY: Cases = [
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt_embeds": 5}, "prompt_embeds"),
    ({"prompt": ["x"] * 2000}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logprobs": 1000}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprob_token_ids": [10**6], "logprobs": 1}, "logprob_token_ids"),
    ({"logprob_token_ids": [1] * 1000, "logprobs": 1}, "logprob_token_ids"),
    ({"suffix": "end"}, "suffix"),
    ({"suffix": 3}, "suffix"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"best_of": 3}, "best_of"),
]


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_a_wrong_field_of_any_generation_is_named(
    mesh: BackEnd, client: httpx.AsyncClient, path: str
) -> None:
    for fields, param in COMMON:
        await check(mesh, client, path, fields, param)


async def test_a_wrong_field_of_a_chat_is_named(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    for fields, param in CHAT_ONLY:
        await check(mesh, client, CHAT, fields, param)


async def test_a_wrong_field_of_a_completion_is_named(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    for fields, param in PLAIN_ONLY:
        await check(mesh, client, PLAIN, fields, param)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"null", 400),
        (b"[1, 2]", 400),
        (b"\xff\xfe", 400),
        (b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
        (b'{"messages": NaN}', 400),
        (b'{"temperature": 1e999, "messages": [{"role": "user"}]}', 400),
        (b'{"x": "' + b"y" * (10 * MEBIBYTE) + b'"}', 413),
    ],
    ids=["empty", "cut", "null", "list", "no utf-8", "deep", "nan", "infinite", "10 MB"],
)
async def test_a_body_that_is_not_a_request_is_refused(
    mesh: BackEnd, client: httpx.AsyncClient, body: bytes, status: int
) -> None:
    headers = {"content-type": "application/json"}
    response = await client.post(CHAT, content=body, headers=headers)
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]


async def test_a_large_body_without_a_length_is_refused(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * MEBIBYTE

    headers = {"content-type": "application/json"}
    response = await client.post(CHAT, content=parts(), headers=headers)
    assert response.status_code == 413


async def test_a_form_is_not_json(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, data={"model": "x"})
    assert (response.status_code, response.json()["error"]["code"]) == (
        415,
        "unsupported_media_type",
    )


async def test_an_unknown_route_and_method_have_the_same_error_shape(
    client: httpx.AsyncClient,
) -> None:
    for response in (await client.get("/v2/nothing"), await client.get(CHAT)):
        assert response.status_code in (404, 405)
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert response.headers["x-request-id"]


async def test_a_request_id_that_cannot_be_a_header_is_refused(
    client: httpx.AsyncClient,
) -> None:
    response = await client.post(CHAT, json={}, headers={"x-request-id": "x" * 500})
    assert response.json()["error"]["param"] == "X-Request-Id"


async def test_errors_of_the_tokenizer_reach_the_client(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    message = {"role": "user", "content": "a broken template"}
    body = {"model": mesh.model, "messages": [message]}
    response = await client.post(CHAT, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template")


@pytest.mark.parametrize(
    "body",
    [{}, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, {"prompt": 3}],
)
async def test_tokenize_needs_a_prompt_or_messages(
    mesh: BackEnd, client: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    response = await client.post("/tokenize", json={"model": mesh.model, **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


async def test_uploads_have_limits(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        BackEnd(bus_settings, redis_settings, max_media_bytes=2048) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        for data, status in ((b"", 400), (b"x" * 3000, 413), (b"x" * MEBIBYTE, 413)):
            response = await client.post("/v1/files", files={"file": ("a.png", data)})
            assert response.status_code == status, response.text
        twice = {"purpose": ["vision", "user_data"]}
        response = await client.post("/v1/files", files={"file": ("a.png", b"x")}, data=twice)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "purpose")
        assert (await client.post("/v1/files", json={})).status_code == 415
        assert (await client.post("/v1/files", data={"a": "b"})).status_code == 415
        form = {"content-type": "multipart/form-data; boundary=x"}
        broken = await client.post("/v1/files", content=b"nonsense", headers=form)
        assert broken.status_code == 400
        assert (await client.get("/v1/files/file-none")).status_code == 404
        assert (await client.delete("/v1/files/file-none")).status_code == 404


@pytest.mark.parametrize("key", ["9" * 5000, "\u00b2", "messages[0].a" * 50_000])
async def test_a_key_of_logit_bias_that_is_not_a_number_is_refused(
    mesh: BackEnd, client: httpx.AsyncClient, key: str
) -> None:
    body = {"model": mesh.model, "messages": [{"role": "user"}], "logit_bias": {key: 1.0}}
    response = await client.post(CHAT, json=body)
    assert response.status_code == 400
    assert len(response.content) < 500


async def test_a_request_with_many_warnings_is_answered(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    include = ["web_search_call.results"] * 20_000
    body = {"model": mesh.model, "input": "Hi", "include": include, "store": False}
    response = await client.post("/v1/responses", json=body)
    assert response.status_code == 200
    assert len(response.headers.get_list("x-tokenmesh-warning")) == 1
