"""POST /v1/responses/input_tokens, as the openai client asks it."""

from collections.abc import AsyncIterator

import openai
import pytest

from tests.fakes.back_end import BackEnd


@pytest.fixture
async def client(mesh: BackEnd) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=10
    ) as connected:
        yield connected


async def test_the_count_is_that_of_the_usage_of_the_response(
    mesh: BackEnd, client: openai.AsyncOpenAI
) -> None:
    count = client.responses.input_tokens.count
    made = await client.responses.create(model=mesh.model, input="Hi", instructions="Be short")
    counted = await count(model=mesh.model, input="Hi", instructions="Be short")
    assert made.usage is not None
    assert (counted.object, counted.input_tokens) == (
        "response.input_tokens",
        made.usage.input_tokens,
    )
    num_generated = len(mesh.workers[0].generates)
    longer = await count(model=mesh.model, input="And?", previous_response_id=made.id)
    assert longer.input_tokens > counted.input_tokens
    assert len(mesh.workers[0].generates) == num_generated


async def test_what_is_wrong_is_named_as_the_client_calls_it(
    mesh: BackEnd, client: openai.AsyncOpenAI
) -> None:
    count = client.responses.input_tokens.count
    for fields, param in (
        ({"input": []}, "input"),
        ({"input": "Hi", "tools": [{"type": "nothing"}]}, "tools[0].type"),
        ({"input": "Hi", "text": {"format": {"type": "odd"}}}, "text.format.type"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            await count(model=mesh.model, **fields)
        assert error.value.param == param
    for asked in (
        count(model="another", input="Hi"),
        count(model=mesh.model, input="Hi", previous_response_id="resp_0"),
    ):
        with pytest.raises(openai.NotFoundError):
            await asked
