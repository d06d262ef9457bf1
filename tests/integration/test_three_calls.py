"""Render, generate and derender give exactly the result of one call, streamed or not."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.fakes.back_end import BackEnd, saying
from tests.fakes.parsers import PLUGINS
from tests.fakes.three_calls import CHAT, COMPLETION, ThreeCalls, announce_tokenizer, events_of
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.messages import Generate

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in "fg"
]
TEXTS = ("<hm>Look, na\u00efve{f:ab}{g:c}", "Caf\u00e9 \U0001f600 and more. Stop here, not there.")


def script(generate: Generate) -> list[int]:
    """The choices of a request say different things."""
    return saying(TEXTS[generate.sampling.seed % 2])(generate)


@pytest.fixture
async def mesh(bus_settings: BusSettings, redis_settings: RedisSettings) -> AsyncIterator[BackEnd]:
    back_end = BackEnd(bus_settings, redis_settings, script, scale_out=True, parser_plugins=PLUGINS)
    back_end.tokens_per_step = 3
    async with back_end:
        back_end.tokenizer.tool_call_parser = "bracket_calls"
        back_end.tokenizer.reasoning_parser = "brackets"
        await announce_tokenizer(back_end)
        yield back_end


@pytest.fixture
async def calls(mesh: BackEnd) -> AsyncIterator[ThreeCalls]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=10) as client:
        yield ThreeCalls(client)


CHATS: dict[str, dict[str, Any]] = {
    "plain": {"seed": 1},
    "tools and reasoning": {"seed": 0, "tools": TOOLS},
    "without reasoning": {"seed": 0, "tools": TOOLS, "include_reasoning": False},
    "two choices": {"seed": 0, "n": 2, "tools": TOOLS},
    "logprobs": {"seed": 0, "n": 2, "logprobs": True, "top_logprobs": 2},
    "named logprobs": {"seed": 1, "logprobs": True, "logprob_token_ids": [9, 7]},
    "stop": {"seed": 1, "stop": ["Stop", "not"], "n": 2},
    "length": {"seed": 1, "max_tokens": 3},
    "token ids": {"seed": 1, "return_token_ids": True, "return_prompt_text": True},
    "echo": {"seed": 1, "echo": True, "add_generation_prompt": False},
    "intervals": {"seed": 1, "stream_interval": 4, "stop": ["here"]},
    "required": {"seed": 0, "tools": TOOLS, "tool_choice": "required"},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {"seed": 1},
    "echo and stop": {"seed": 0, "echo": True, "stop": [" Stop"], "n": 2, "logprobs": 1},
    "kept stop": {"seed": 1, "stop": ["more"], "include_stop_str_in_output": True},
    "prompt only": {"seed": 1, "echo": True, "max_tokens": 0, "logprobs": 0},
    "token ids": {"seed": 1, "return_token_ids": True},
    "min tokens": {"seed": 1, "stop": ["e"], "min_tokens": 9},
}


STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def of_chat(mesh: BackEnd, fields: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi"}]
    return {"model": mesh.model, "messages": messages, "request_id": "r-1", **fields}


def of_completion(mesh: BackEnd, fields: dict[str, Any]) -> dict[str, Any]:
    body = {"model": mesh.model, "prompt": "Once upon", "max_tokens": 60, "request_id": "r-1"}
    return {**body, **fields}


def merged(chunks: list[Any]) -> dict[str, Any]:
    """Merge a stream as a client does; nothing is left of its portions."""
    whole: dict[str, Any] = {"usage": None}
    for chunk in chunks:
        whole["id"], whole["model"] = chunk["id"], chunk["model"]
        whole["object"] = chunk["object"]
        whole["usage"] = chunk.get("usage") or whole["usage"]
        for name in ("prompt_token_ids", "prompt_text"):
            if name in chunk:
                whole[name] = chunk[name]
        for choice in chunk["choices"]:
            add(whole.setdefault(choice["index"], {}), choice)
    return whole


def add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if name == "tool_calls":
            known = whole.setdefault(name, {})
            for call in value:
                add(known.setdefault(call["index"], {}), call)
        elif isinstance(value, dict):
            add(whole.setdefault(name, {}), value)
        elif isinstance(value, list) or (isinstance(value, str) and name != "role"):
            whole[name] = whole[name] + value if name in whole else value
        elif value is not None:
            whole[name] = value
        if name == "id" and isinstance(value, str):
            whole[name] = value


def timeless(body: Any) -> Any:
    return plain_id({name: value for name, value in body.items() if name != "created"})


def plain_id(body: Any) -> Any:
    """The body with the client's id: render puts the kind of the request before it, as in vLLM.

    Ids of calls are made from that one.
    """
    text = json.dumps({**body, "id": body["id"].removeprefix("chatcmpl-").removeprefix("cmpl-")})
    return json.loads(CALL_ID.sub('"id": "a call"', text))


CALL_ID = re.compile(r'"id": "[a-z-]*(?:call|tool)[^"]*"')


async def test_three_calls_are_one_chat(mesh: BackEnd, calls: ThreeCalls) -> None:
    for name, fields in CHATS.items():
        body = of_chat(mesh, fields)
        once = (await calls.post(CHAT, body)).json()
        assert timeless(await calls.whole(CHAT, body)) == timeless(once), name


async def test_three_calls_are_one_streamed_chat(mesh: BackEnd, calls: ThreeCalls) -> None:
    for name, fields in CHATS.items():
        body = of_chat(mesh, fields | STREAM)
        once = merged(events_of(await calls.post(CHAT, body)))
        thrice = plain_id(merged(await calls.stream(CHAT, body)))
        if body.get("n", 1) > 1:
            # No call sees all of several choices: their tokens of reasoning are not counted.
            del once["usage"]["completion_tokens_details"]
            del thrice["usage"]["completion_tokens_details"]
        assert thrice == plain_id(once), name


async def test_three_calls_are_one_completion(mesh: BackEnd, calls: ThreeCalls) -> None:
    for name, fields in COMPLETIONS.items():
        body = of_completion(mesh, fields)
        once = (await calls.post(COMPLETION, body)).json()
        assert timeless(await calls.whole(COMPLETION, body)) == timeless(once), name


async def test_three_calls_are_one_streamed_completion(mesh: BackEnd, calls: ThreeCalls) -> None:
    for name, fields in COMPLETIONS.items():
        body = of_completion(mesh, fields | STREAM)
        once = merged(events_of(await calls.post(COMPLETION, body)))
        assert plain_id(merged(await calls.stream(COMPLETION, body))) == plain_id(once), name


async def test_several_prompts_are_one_completion(mesh: BackEnd, calls: ThreeCalls) -> None:
    fields = {"prompt": ["Once upon", "In the beginning"], "n": 2, "seed": 0, "echo": True}
    body = of_completion(mesh, fields | {"logprobs": 2, "prompt_logprobs": 1})
    once = (await calls.post(COMPLETION, body)).json()
    thrice = await calls.whole(COMPLETION, body)
    # As in vLLM the id is that of the first prompt's request.
    assert (once["id"], thrice["id"]) == ("r-1", "cmpl-r-1-0")
    assert timeless({**thrice, "id": "r-1"}) == timeless(once)
    body = of_completion(mesh, fields | {"logprobs": 2, "stream": True})
    streamed = merged(await calls.stream(COMPLETION, body))
    answer = merged(events_of(await calls.post(COMPLETION, body)))
    assert {**streamed, "id": "r-1"} == answer
