"""Reasoning and tools with the anthropic client: turns, streams, helpers."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import beta_async_tool

from tests.fakes.back_end import BackEnd, eos_id, fake_tokenizer
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.messages import Generate
from tokenmesh.shared.tokens import unpack_ids

THOUGHT = "Hm."
CALL = '<tool_call>{"name":"f","arguments":{"at":"%s"}}</tool_call>'
CALLS = CALL % "caf\u00e9" + CALL % "sky"
FIRST = f"<think>{THOUGHT}</think>\n\nLook.\n{CALLS}"
SECOND = "It is sunny."
TOOL: Any = {
    "name": "f",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
MESSAGES: Any = [{"role": "user", "content": "How is it?"}]


def script(generate: Generate) -> list[int]:
    """Reasons and calls a tool until the prompt has a result."""
    tokenizer = fake_tokenizer()
    prompt = tokenizer.decode(unpack_ids(generate.prompt_ids), skip_special_tokens=False)
    text = SECOND if "tool: " in prompt else FIRST
    return [*tokenizer.encode(text).ids, eos_id()]


@pytest.fixture
async def mesh(bus_settings: BusSettings, redis_settings: RedisSettings) -> AsyncIterator[BackEnd]:
    back_end = BackEnd(bus_settings, redis_settings, script)
    back_end.tokens_per_step = 4
    async with back_end:
        back_end.tokenizer.reasoning_parser = "qwen3"
        back_end.tokenizer.tool_call_parser = "hermes"
        yield back_end


@pytest.fixture
async def client(mesh: BackEnd) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=mesh.url, api_key="none", max_retries=0, timeout=10
    ) as connected:
        yield connected


def requested(mesh: BackEnd, **fields: Any) -> Any:
    return {"model": mesh.model, "max_tokens": 150, "messages": MESSAGES, "tools": [TOOL]} | fields


def messages_of(mesh: BackEnd) -> list[dict[str, Any]]:
    prompt: Any = mesh.tokenizer.received[-1].prompt
    messages: list[dict[str, Any]] = json.loads(prompt.messages_json)
    return messages


async def test_a_round_of_tools(mesh: BackEnd, client: anthropic.AsyncAnthropic) -> None:
    first = await client.messages.create(**requested(mesh))
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert first.stop_reason == "tool_use"
    thinking, text, *calls = first.content
    assert thinking.type == "thinking"
    assert thinking.thinking.strip() == THOUGHT.strip()
    assert text.type == "text"
    assert text.text.strip() == "Look."
    assert first.usage.output_tokens_details is not None
    assert 0 < first.usage.output_tokens_details.thinking_tokens < first.usage.output_tokens
    results = []
    for call, at in zip(calls, ("caf\u00e9", "sky"), strict=True):
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("f", {"at": at})
        results.append({"type": "tool_result", "tool_use_id": call.id, "content": "sunny"})
    turns = [*MESSAGES, first.to_param(), {"role": "user", "content": results}]
    second = await client.messages.create(**requested(mesh, messages=turns))
    assert second.content[0].type == "text"
    assert second.content[0].text == SECOND
    sent = messages_of(mesh)
    assert [each["role"] for each in sent] == ["user", "assistant", "tool", "tool"]
    assert sent[1]["reasoning"].strip() == THOUGHT.strip()
    assert [each["id"] for each in sent[1]["tool_calls"]] == [
        each["tool_call_id"] for each in sent[2:]
    ]


async def test_a_streamed_round_is_the_same(
    mesh: BackEnd, client: anthropic.AsyncAnthropic
) -> None:
    whole = await client.messages.create(**requested(mesh))
    async with client.messages.stream(**requested(mesh)) as stream:
        kinds = {event.type async for event in stream}
        streamed = await stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json"} <= kinds
    ignored = {"id", "content"}
    assert streamed.model_dump(exclude=ignored) == whole.model_dump(exclude=ignored)
    for one, other in zip(streamed.content, whole.content, strict=True):
        assert one.model_dump(exclude={"id"}) == other.model_dump(exclude={"id"})


async def test_the_tool_runner(mesh: BackEnd, client: anthropic.AsyncAnthropic) -> None:
    looked = []

    @beta_async_tool
    async def f(at: str) -> str:
        """Look at a place."""
        looked.append(at)
        return "sunny"

    runner = client.beta.messages.tool_runner(
        model=mesh.model, max_tokens=150, messages=MESSAGES, tools=[f]
    )
    final = await runner.until_done()
    assert sorted(looked) == ["caf\u00e9", "sky"]
    assert final.content[0].type == "text"
    assert final.content[0].text == SECOND


async def test_without_tools_a_call_is_text(
    mesh: BackEnd, client: anthropic.AsyncAnthropic
) -> None:
    without: list[Any] = [{"tools": []}, {"tool_choice": {"type": "none"}}]
    for fields in without:
        message = await client.messages.create(**requested(mesh, **fields))
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.stop_reason == "end_turn"


async def test_one_call_at_a_time(mesh: BackEnd, client: anthropic.AsyncAnthropic) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = await client.messages.create(**requested(mesh, tool_choice=choice))
    assert [block.type for block in message.content].count("tool_use") == 1


async def test_omitted_thinking(mesh: BackEnd, client: anthropic.AsyncAnthropic) -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    async with client.messages.stream(**requested(mesh, thinking=thinking)) as stream:
        block = (await stream.get_final_message()).content[0]
    assert block.type == "thinking"
    assert block.thinking == ""
    assert block.signature


async def test_thinking_reaches_the_template_and_the_worker(
    mesh: BackEnd, client: anthropic.AsyncAnthropic
) -> None:
    thinking = {"type": "enabled", "budget_tokens": 20}
    await client.messages.create(**requested(mesh, thinking=thinking))
    prompt: Any = mesh.tokenizer.received[-1].prompt
    assert json.loads(prompt.template_kwargs_json) == {"enable_thinking": True, "thinking": True}
    budget = mesh.workers[0].generates[-1].sampling.thinking
    assert budget is not None
    assert budget.num_tokens == 20


async def test_a_budget_for_a_model_that_does_not_reason_is_a_warning(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with BackEnd(bus_settings, redis_settings) as mesh:
        body = requested(mesh, thinking={"type": "enabled", "budget_tokens": 20}, tools=[])
        async with httpx.AsyncClient(base_url=mesh.url) as plain:
            response = await plain.post("/v1/messages", json=body)
    assert response.status_code == 200
    assert "thinking.budget_tokens" in response.headers["x-tokenmesh-warning"]
    assert mesh.workers[0].generates[-1].sampling.thinking is None


async def test_a_call_that_is_cut_off_keeps_its_partial_input(
    mesh: BackEnd, client: anthropic.AsyncAnthropic
) -> None:
    whole = await client.messages.create(**requested(mesh))
    for max_tokens in range(1, whole.usage.output_tokens, 11):
        message = await client.messages.create(**requested(mesh, max_tokens=max_tokens))
        assert message.stop_reason == "max_tokens"
        async with client.messages.stream(**requested(mesh, max_tokens=max_tokens)) as stream:
            streamed = await stream.get_final_message()
        kinds = [block.type for block in message.content]
        assert kinds == [block.type for block in streamed.content]
