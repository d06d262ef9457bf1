"""The openai Python client, unchanged, against a real gateway with fakes behind it."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.fakes.back_end import BackEnd

TEXT = "Hello from the mesh, na\u00efve caf\u00e9!"
MESSAGES: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def client(mesh: BackEnd) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=10
    ) as connected:
        yield connected


async def test_models_are_listed(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    names = [model.id async for model in client.models.list()]
    assert names == [mesh.model, f"{mesh.model}-alias"]
    assert (await client.models.retrieve(names[1])).id == names[1]


async def test_a_chat_completion(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=mesh.model, messages=MESSAGES)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    details = answer.usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens == 3


async def test_a_chat_stream(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=mesh.model,
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == TEXT
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 1


async def test_the_stream_helper(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model=mesh.model, messages=MESSAGES) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == TEXT


async def test_several_choices(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=mesh.model, messages=MESSAGES, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {TEXT}
    seeds = [each.sampling.seed for each in mesh.workers[0].generates]
    assert seeds == [seeds[0], seeds[0] + 1, seeds[0] + 2]


async def test_several_choices_of_a_stream(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=mesh.model, messages=MESSAGES, n=2, stream=True
    )
    texts = ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [TEXT, TEXT]


async def test_a_stop_string(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=mesh.model, messages=MESSAGES, stop=["the mesh", "never"]
    )
    assert answer.choices[0].message.content == "Hello from "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["stop_reason"] == "the mesh"
    await mesh.until(lambda: len(mesh.workers[0].cancels) == 1)


async def test_the_length_limit(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=mesh.model, messages=MESSAGES, max_completion_tokens=4
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


async def test_log_probabilities_of_a_chat(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=mesh.model, messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    data = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content)
    assert data.decode() == TEXT + "<|im_end|>"
    assert {len(entry.top_logprobs) for entry in logprobs.content} == {2}
    assert logprobs.content[0].logprob == -0.5


async def test_log_probabilities_of_a_stream(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=mesh.model, messages=MESSAGES, logprobs=True, stream=True
    )
    data = b""
    async for chunk in stream:
        logprobs = chunk.choices[0].logprobs
        for entry in (logprobs.content or ()) if logprobs is not None else ():
            data += bytes(entry.bytes or ())
    assert data.decode() == TEXT + "<|im_end|>"


async def test_a_completion(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=mesh.model, prompt="Once", max_tokens=100)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT, "stop")
    assert answer.id.startswith("cmpl-")


async def test_a_completion_stream(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model=mesh.model, prompt="Once", max_tokens=100, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_several_prompts_and_choices(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=mesh.model, prompt=["One", "Two"], n=2, echo=True, max_tokens=100
    )
    texts = [choice.text for choice in answer.choices]
    assert texts == ["One" + TEXT, "One" + TEXT, "Two" + TEXT, "Two" + TEXT]
    assert answer.usage is not None
    per_choice = len(mesh.script(mesh.workers[0].generates[0]))
    assert answer.usage.completion_tokens == 4 * per_choice


async def test_prompts_as_ids(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    one = await client.completions.create(model=mesh.model, prompt=[20, 21, 22], max_tokens=2)
    assert one.usage is not None
    assert one.usage.prompt_tokens == 3
    two = await client.completions.create(model=mesh.model, prompt=[[20], [21, 22]], max_tokens=2)
    assert two.usage is not None
    assert (len(two.choices), two.usage.prompt_tokens) == (2, 3)


async def test_log_probabilities_of_an_echoed_completion(
    mesh: BackEnd, client: openai.AsyncOpenAI
) -> None:
    answer = await client.completions.create(
        model=mesh.model, prompt="The fox", max_tokens=0, echo=True, logprobs=1
    )
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("The fox", "length")
    logprobs = choice.logprobs
    assert logprobs is not None
    tokens, offsets = logprobs.tokens or [], logprobs.text_offset or []
    assert "".join(tokens) == "The fox"
    assert offsets[:2] == [0, len(tokens[0])]
    assert (logprobs.token_logprobs or [0])[0] is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


async def test_an_unknown_model_is_not_found(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_a_wrong_field_is_a_bad_request(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=mesh.model, messages=MESSAGES, temperature=-1.0)
    assert caught.value.param == "temperature"


async def test_the_error_of_a_too_long_prompt_has_the_numbers(
    mesh: BackEnd, client: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=mesh.model, prompt=[20] * 300)
    assert caught.value.code == "context_length_exceeded"
    assert "256" in caught.value.message
    assert "300" in caught.value.message


async def test_a_full_mesh_is_a_rate_limit(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    mesh.scheduler.is_full = True
    with pytest.raises(openai.RateLimitError):
        await client.chat.completions.create(model=mesh.model, messages=MESSAGES)


async def test_an_upload_is_stored_described_and_deleted(client: openai.AsyncOpenAI) -> None:
    upload = await client.files.create(file=("cat.png", b"PNG"), purpose="vision")
    assert (upload.bytes, upload.filename, upload.purpose) == (3, "cat.png", "vision")
    assert (await client.files.retrieve(upload.id)).id == upload.id
    assert (await client.files.content(upload.id)).content == b"PNG"
    assert (await client.files.delete(upload.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(upload.id)


async def test_a_disconnecting_client_cancels(mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model=mesh.model, messages=MESSAGES, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await mesh.until(lambda: len(mesh.workers[0].cancels) == 1)
