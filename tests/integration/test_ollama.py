"""Ollama's API: answers in its shapes, whole and as lines, over a real gateway."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

import tokenmesh
from tests.fakes.back_end import BackEnd, saying
from tests.fakes.pool_mesh import SIZE, PoolMesh, expected
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.messages.tokenize import ChatPrompt, TextPrompt

TEXT = "Hello from the mesh, na\u00efve caf\u00e9!"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture
async def mesh(bus_settings: BusSettings, redis_settings: RedisSettings) -> AsyncIterator[BackEnd]:
    async with BackEnd(bus_settings, redis_settings) as mesh:
        mesh.tokenizer.tool_call_parser = "hermes"
        mesh.tokenizer.reasoning_parser = "qwen3"
        yield mesh


@pytest.fixture
async def client(mesh: BackEnd) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=10) as client:
        yield client


async def lines(client: httpx.AsyncClient, path: str, body: Any) -> list[dict[str, Any]]:
    # As curl sends it.
    headers = {"content-type": "application/x-www-form-urlencoded"}
    response = await client.post(path, content=json.dumps(body), headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json={"stream": False, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_a_chat_is_a_stream_of_lines_unless_it_is_not(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    chat = {"model": f"{mesh.model}:latest", "messages": [{"role": "user", "content": "Hi"}]}
    parts = await lines(client, "/api/chat", chat)
    assert len(parts) > 2
    assert "".join(each["message"]["content"] for each in parts) == TEXT
    assert [each["done"] for each in parts] == [False] * (len(parts) - 1) + [True]
    last = parts[-1]
    assert (last["model"], last["done_reason"]) == (f"{mesh.model}:latest", "stop")
    assert all(isinstance(last[name], int) for name in DURATIONS)
    assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] - 2
    assert last["prompt_eval_count"] > 0
    assert last["created_at"].endswith("Z")
    whole = await post(client, "/api/chat", **chat, options={"num_predict": 3, "num_ctx": 64})
    assert (whole["done_reason"], whole["eval_count"]) == ("length", 3)
    assert TEXT.startswith(whole["message"]["content"])
    for unlimited in (0, -1, -2):
        whole = await post(client, "/api/chat", **chat, options={"num_predict": unlimited})
        assert (whole["done_reason"], whole["message"]["content"]) == ("stop", TEXT)
    loaded = await post(client, "/api/chat", model=mesh.model)
    assert (loaded["done"], loaded["done_reason"]) == (True, "load")


async def test_reasoning_and_calls_are_parts_of_the_message(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    mesh.workers[0].script = saying(f"<think>Look it up.</think>{call}")
    messages: list[Any] = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
        },
        {"role": "tool", "tool_name": "weather", "content": "snow"},
        {"role": "user", "content": "And Rome?"},
    ]
    chat = {"model": mesh.model, "messages": messages, "tools": [TOOL], "think": True}
    wanted = [{"function": {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}}]
    message = (await post(client, "/api/chat", **chat))["message"]
    assert message["tool_calls"] == wanted
    assert message["thinking"] == "Look it up."
    parts = await lines(client, "/api/chat", chat)
    assert [each["message"]["tool_calls"] for each in parts if "tool_calls" in each["message"]] == [
        wanted
    ]
    assert "".join(each["message"].get("thinking", "") for each in parts) == "Look it up."
    prompt = mesh.tokenizer.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    sent = json.loads(prompt.messages_json)
    assert sent[1]["tool_calls"][0]["id"] == sent[2]["tool_call_id"]
    assert json.loads(prompt.template_kwargs_json or b"{}")["enable_thinking"] is True


async def test_a_prompt_has_a_template_unless_it_is_raw(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    body = {"model": mesh.model, "prompt": "Hi", "options": {"seed": 1, "stop": ["mesh"]}}
    answer = await post(client, "/api/generate", **body, system="Be brief.")
    assert answer["response"] == "Hello from the "
    prompt = mesh.tokenizer.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [each["role"] for each in json.loads(prompt.messages_json)] == ["system", "user"]
    parts = await lines(client, "/api/generate", {**body, "raw": True})
    assert "".join(each["response"] for each in parts) == "Hello from the "
    prompt = mesh.tokenizer.received[-1].prompt
    assert isinstance(prompt, TextPrompt)
    assert prompt.text == "Hi"


@pytest.mark.parametrize(
    ("path", "fields", "status", "problem"),
    [
        ("/api/chat", {"messages": [{"role": "user"}], "model": "none"}, 404, "does not exist"),
        ("/api/chat", {"messages": "x"}, 400, "messages"),
        ("/api/generate", {"prompt": "a", "options": {"mirostat": 2}}, 400, "options.mirostat"),
        ("/api/generate", {"prompt": "a", "options": {"num_predict": "x"}}, 400, "num_predict"),
        ("/api/generate", {"prompt": "a", "options": {"top_p": 7}}, 400, "options.top_p"),
        ("/api/generate", {"prompt": "a", "template": "{{ . }}"}, 400, "template"),
        ("/api/generate", {"prompt": "a", "format": "yaml"}, 400, "format"),
        ("/api/chat", {"messages": [{"role": "tool", "content": "x"}]}, 400, "without a call"),
        ("/api/pull", {}, 404, "no route"),
    ],
)
async def test_errors_have_ollamas_shape(
    mesh: BackEnd,
    client: httpx.AsyncClient,
    path: str,
    fields: dict[str, Any],
    status: int,
    problem: str,
) -> None:
    response = await client.post(path, json={"model": mesh.model, **fields})
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    assert problem in response.json()["error"]


async def test_models_are_described(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    assert (await client.get("/api/version")).json() == {"version": tokenmesh.__version__}
    names = [each["name"] for each in (await client.get("/api/tags")).json()["models"]]
    assert names == [mesh.model, f"{mesh.model}-alias"]
    running = (await client.get("/api/ps")).json()["models"]
    assert [each["model"] for each in running] == [mesh.model]
    shown = await post(client, "/api/show", model=mesh.model)
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["tokenmesh.context_length"] == 256


async def test_embeddings(bus_settings: BusSettings, redis_settings: RedisSettings) -> None:
    async with (
        PoolMesh(bus_settings, redis_settings, "embed") as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=10) as client,
    ):
        several = await post(client, "/api/embed", model=mesh.model, input=["one", "two"])
        assert several["embeddings"] == [
            pytest.approx(expected("one")),
            pytest.approx(expected("two")),
        ]
        assert several["prompt_eval_count"] > 0
        short = await post(client, "/api/embed", model=mesh.model, input="one", dimensions=4)
        assert [len(each) for each in short["embeddings"]] == [4]
        one = await post(client, "/api/embeddings", model=mesh.model, prompt="one")
        assert one == {"embedding": pytest.approx(expected("one"))}
        assert len(one["embedding"]) == SIZE
        for dimensions in (10**18, 0, SIZE + 1):
            wrong = {"model": mesh.model, "input": "one", "dimensions": dimensions}
            refused = await client.post("/api/embed", json=wrong)
            assert refused.status_code == 400
            assert "dimensions" in refused.json()["error"]
        refused = await client.post(
            "/api/chat", json={"model": mesh.model, "messages": [{"role": "user", "content": "a"}]}
        )
        assert refused.status_code == 400
