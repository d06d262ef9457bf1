"""/v1/chat/completions/batch: several conversations, one body of choices."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.fakes.back_end import BackEnd, eos_id, fake_tokenizer
from tokenmesh.services.gateway.apis.openai import request_builder as desk
from tokenmesh.services.gateway.apis.openai.batch_chat import BatchChatRequest
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.messages import Generate
from tokenmesh.shared.tokens import unpack_ids

PATH = "/v1/chat/completions/batch"
TALKS = [[{"role": "user", "content": word}] for word in ("one", "two", "three")]


def repeat(generate: Generate) -> list[int]:
    """A worker that says its prompt again."""
    return [*unpack_ids(generate.prompt_ids), eos_id()]


@pytest.fixture
async def mesh(bus_settings: BusSettings, redis_settings: RedisSettings) -> AsyncIterator[BackEnd]:
    async with BackEnd(bus_settings, redis_settings, script=repeat, max_choices=6) as back_end:
        yield back_end


def ask(mesh: BackEnd, **fields: Any) -> dict[str, Any]:
    return {"model": mesh.model, "messages": TALKS, **fields}


async def test_choices_count_over_conversations_and_n(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    response = await client.post(PATH, json=ask(mesh, n=2, logprobs=True, return_token_ids=True))
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [each["index"] for each in answer["choices"]] == list(range(6))
    texts = [each["message"]["content"] for each in answer["choices"]]
    wanted = [f'user: "{word}"\nassistant: ' for word in ("one", "two", "three")]
    assert texts == [text for text in wanted for _ in range(2)]
    tokens = [len(fake_tokenizer().encode(text).ids) for text in wanted]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == sum(tokens)
    assert usage["completion_tokens"] == 2 * (sum(tokens) + 3)
    for choice in answer["choices"]:
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert answer["id"] == response.headers["x-request-id"]
    ids = {each.request_id for each in mesh.workers[0].generates}
    assert ids == {f"{answer['id']}-{index}" for index in range(3)}


async def test_each_conversation_has_its_own_echo(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    talks = [
        [*talk, {"role": "assistant", "content": f"I say {index}"}]
        for index, talk in enumerate(TALKS)
    ]
    fields = {"echo": True, "continue_final_message": True, "add_generation_prompt": False}
    answer = (await client.post(PATH, json=ask(mesh, messages=talks, **fields))).json()
    for index, choice in enumerate(answer["choices"]):
        assert choice["message"]["content"].startswith(f"I say {index}user: ")


async def test_sampling_fields_hold_for_all_and_a_warning_comes_once(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    response = await client.post(PATH, json=ask(mesh, temperature=0.3, seed=7, frob=1, best_of=1))
    assert response.headers["x-tokenmesh-warning"] == "unknown fields ignored: frob"
    sampled = {
        (each.sampling.temperature, each.sampling.seed) for each in mesh.workers[0].generates
    }
    assert sampled == {(0.3, 7)}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [[]]}, "messages[0]"),
    ({"messages": [TALKS[0], "x"]}, "messages[1]"),
    ({"messages": [TALKS[0], [{"content": "x"}]]}, "messages[1][0].role"),
    ({"messages": TALKS[0]}, "messages[0]"),
    ({"n": 3}, "messages"),
    ({"stream": True}, "stream"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"early_stopping": True}, "early_stopping"),
    ({"best_of": 2}, "best_of"),
    ({"guided_decoding_backend": "x"}, "guided_decoding_backend"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"temperature": -1}, "temperature"),
    (
        {"messages": [TALKS[0], [{"role": "user", "content": "a broken template"}]]},
        "chat_template",
    ),
    ({"max_tokens": 10**6}, "max_tokens"),
]


async def test_an_error_names_its_conversation(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    for fields, param in BAD:
        response = await client.post(PATH, json=ask(mesh, **fields))
        assert response.status_code == 400, (fields, response.text)
        assert response.json()["error"]["param"] == param, (fields, response.text)
    broken = await client.post(PATH, json=ask(mesh, **BAD[-2][0]))
    assert broken.json()["error"]["message"].startswith("messages[1]: ")
    long = [TALKS[0], [{"role": "user", "content": "x" * 2000}]]
    too_long = (await client.post(PATH, json=ask(mesh, messages=long))).json()["error"]
    assert (too_long["code"], too_long["param"]) == ("context_length_exceeded", "messages[1]")


async def test_an_error_of_media_names_its_conversation(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "!" * 40_000}}
    talks = [TALKS[0], [{"role": "user", "content": [part]}]]
    error = (await client.post(PATH, json=ask(mesh, messages=talks))).json()["error"]
    assert "messages[1][0].content[0]" in error["message"]


async def test_fields_that_conversations_share_are_checked_once(
    mesh: BackEnd, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    monkeypatch.setattr(desk, "check_structured", lambda each, _limits: checked.append(each.text))
    response = await client.post(PATH, json=ask(mesh, structured_outputs={"regex": "a"}, seed=3))
    assert response.status_code == 200, response.text
    assert checked == ["a"]
    sent = mesh.workers[0].generates
    assert len(sent) == 3
    assert {each.sampling.seed for each in sent} == {3}


async def test_each_conversation_draws_its_own_seed(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    response = await client.post(PATH, json=ask(mesh, temperature=1))
    assert response.status_code == 200, response.text
    assert len({each.sampling.seed for each in mesh.workers[0].generates}) == 3


async def test_too_many_conversations_are_refused_before_they_are_made(
    mesh: BackEnd, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchChatRequest, "conversations", lambda _self: pytest.fail("made"))
    response = await client.post(PATH, json=ask(mesh, messages=TALKS * 3))
    assert response.status_code == 400
    assert "9 conversations" in response.json()["error"]["message"]
