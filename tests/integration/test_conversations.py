"""Conversations with OpenAI's client: their items, and responses that share them."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.fakes.back_end import BackEnd
from tokenmesh.services.gateway.apis.responses.service import Responses
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.messages.tokenize import ChatPrompt

FIRST: Any = {"type": "message", "role": "user", "content": "My name is Ann."}
RESULT: Any = {"type": "function_call_output", "call_id": "c", "output": "x"}
BROKEN: Any = {"type": "nonsense"}


@pytest.fixture
async def mesh(bus_settings: BusSettings, redis_settings: RedisSettings) -> AsyncIterator[BackEnd]:
    limits = {"max_conversation_bytes": 16 * 1024}
    async with BackEnd(bus_settings, redis_settings, responses=limits) as mesh:
        yield mesh


@pytest.fixture
async def client(mesh: BackEnd) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="x", max_retries=0) as client:
        yield client


def prompt_of(mesh: BackEnd) -> list[Any]:
    prompt = mesh.tokenizer.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    found: list[Any] = json.loads(prompt.messages_json)
    return found


async def test_responses_continue_a_conversation(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    made = await client.conversations.create(items=[FIRST], metadata={"a": "b"})
    assert (made.object, made.metadata) == ("conversation", {"a": "b"})
    first = await client.responses.create(model=mesh.model, input="Who am I?", conversation=made.id)
    assert first.status == "completed"
    assert first.conversation is not None
    assert first.conversation.id == made.id
    async with client.responses.stream(
        model=mesh.model, input="Again?", conversation={"id": made.id}
    ) as stream:
        async for _ in stream:
            pass
    contents = [each["content"] for each in prompt_of(mesh)]
    texts = [each if isinstance(each, str) else each[0]["text"] for each in contents]
    assert texts == ["My name is Ann.", "Who am I?", first.output_text, "Again?"]
    items = [each async for each in client.conversations.items.list(made.id, order="asc", limit=2)]
    assert [each.role for each in items if each.type == "message"] == [
        "user",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert len({each.id for each in items}) == 5
    # Generated again after its gateway died, a response adds nothing twice.
    store = mesh.work(Responses).conversations
    assert store is not None
    access = mesh.gateway.core.tenancy.keys.access("/", None)
    again = [each.model_dump(exclude_none=True) for each in items[1:3]]
    await store.add_response(made.id, access, again)
    assert len((await store.get(made.id, access)).items) == 5


async def test_many_changes_of_one_conversation_at_once_all_happen(
    client: openai.AsyncOpenAI,
) -> None:
    made = await client.conversations.create()
    add = client.conversations.items.create
    await asyncio.gather(*(add(made.id, items=[FIRST]) for _ in range(48)))
    items = [each async for each in client.conversations.items.list(made.id, limit=100)]
    assert len({each.id for each in items}) == 48


async def test_items_are_added_read_and_deleted(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    made = await client.conversations.create()
    added = await client.conversations.items.create(made.id, items=[FIRST, FIRST])
    first, second = (each.id or "" for each in added.data)
    assert first != second
    found = await client.conversations.items.retrieve(first, conversation_id=made.id)
    assert found.type == "message"
    assert found.content[0].type == "input_text"
    await client.conversations.items.delete(first, conversation_id=made.id)
    with pytest.raises(openai.NotFoundError):
        await client.conversations.items.retrieve(first, conversation_id=made.id)
    updated = await client.conversations.update(made.id, metadata={"k": "v"})
    assert (await client.conversations.retrieve(made.id)).metadata == updated.metadata
    for broken in (BROKEN, RESULT):
        with pytest.raises(openai.BadRequestError, match=r"items\[0\]"):
            await client.conversations.items.create(made.id, items=[broken])
    long: Any = {**FIRST, "content": "x" * 20_000}
    with pytest.raises(openai.APIStatusError, match="at most 16384"):
        await client.conversations.items.create(made.id, items=[long])
    assert (await client.conversations.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.conversations.items.list(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model=mesh.model, input="a", conversation=made.id)


async def test_a_conversation_needs_a_stored_response(
    mesh: BackEnd, client: openai.AsyncOpenAI
) -> None:
    made = await client.conversations.create()
    for fields in ({"store": False}, {"previous_response_id": "resp_1"}):
        fields_of: Any = fields
        with pytest.raises(openai.BadRequestError, match="conversation"):
            await client.responses.create(
                model=mesh.model, input="a", conversation=made.id, **fields_of
            )
