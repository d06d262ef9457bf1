"""Fields that vLLM's clients know, one by one: what each does to request and response."""

import json
from typing import Any

import httpx
import pytest

from tests.fakes.back_end import MAX_MODEL_LEN, BackEnd, fake_tokenizer
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.tokens import unpack_ids

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
TEXT = "Hello from the mesh, na\u00efve caf\u00e9!"


async def whole(client: httpx.AsyncClient, mesh: BackEnd, path: str, **fields: Any) -> Any:
    own = {"prompt": "Hi"} if path == PLAIN else {"messages": [{"role": "user", "content": "Hi"}]}
    response = await client.post(path, json={"model": mesh.model, **own, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def chunks(client: httpx.AsyncClient, mesh: BackEnd, path: str, **fields: Any) -> list[Any]:
    own = {"prompt": "Hi"} if path == PLAIN else {"messages": [{"role": "user", "content": "Hi"}]}
    body = {"model": mesh.model, **own, **fields, "stream": True}
    text = (await client.post(path, json=body)).text
    return [json.loads(line[6:]) for line in text.split("\n\n") if line[6:7] == "{"]


def talk(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


async def test_a_chats_echo_is_the_last_message_of_the_same_role(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    fields = {"echo": True, "add_generation_prompt": False, "continue_final_message": True}
    parts = [{"type": "text", "text": "I"}, {"type": "text", "text": "say"}]
    for content, echo in (("I say: ", "I say: "), (parts, "I\nsay"), (None, "")):
        messages = talk(("user", "Hi"), ("assistant", content))
        answer = await whole(client, mesh, CHAT, messages=messages, **fields)
        assert answer["choices"][0]["message"]["content"] == echo + TEXT
    answer = await whole(client, mesh, CHAT, echo=True)
    assert answer["choices"][0]["message"]["content"] == TEXT


async def test_an_echo_with_logprobs_contains_those_of_the_prompt(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    answer = await whole(client, mesh, CHAT, echo=True, logprobs=True, top_logprobs=1)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    plain = await whole(client, mesh, CHAT, echo=True)
    assert plain["prompt_logprobs"] is None
    assert [each.sampling.prompt_logprobs for each in mesh.workers[0].generates] == [1, None]


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_running_usage_is_in_every_chunk_from_the_first_on(
    mesh: BackEnd, client: httpx.AsyncClient, path: str
) -> None:
    shown = {"include_usage": True, "continuous_usage_stats": True}
    events = await chunks(client, mesh, path, stream_options=shown, max_tokens=4)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    for event in events:
        usage = event["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    alone = await chunks(client, mesh, path, stream_options={"continuous_usage_stats": True})
    assert not any(event.get("usage") for event in alone)


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_token_ids_come_with_each_chunk_and_the_prompts_with_the_first(
    mesh: BackEnd, client: httpx.AsyncClient, path: str
) -> None:
    events = await chunks(client, mesh, path, return_token_ids=True, max_tokens=5, n=2)
    prompt = unpack_ids(mesh.workers[0].generates[0].prompt_ids)
    for index in (0, 1):
        own = [event for event in events if event["choices"][0]["index"] == index]
        shown = [
            event if path == CHAT else event["choices"][0]
            for event in own
            if "prompt_token_ids" in (event if path == CHAT else event["choices"][0])
        ]
        assert [each["prompt_token_ids"] for each in shown] == [prompt]
        ids = [token for event in own for token in event["choices"][0].get("token_ids") or ()]
        assert ids == mesh.script(mesh.workers[0].generates[0])[:5]


@pytest.mark.parametrize(("max_tokens", "room"), [(10, 10), (None, 1)])
async def test_truncation_to_what_fits_leaves_room_for_the_answer(
    mesh: BackEnd, client: httpx.AsyncClient, max_tokens: int | None, room: int
) -> None:
    long = "word " * 2000
    fields = {"truncate_prompt_tokens": -1, "max_tokens": max_tokens}
    answer = await whole(client, mesh, CHAT, messages=talk(("user", long)), **fields)
    assert answer["usage"]["prompt_tokens"] == MAX_MODEL_LEN - room
    some = await whole(client, mesh, PLAIN, prompt=long, truncate_prompt_tokens=7)
    assert some["usage"]["prompt_tokens"] == 7
    tokenize = mesh.tokenizer.received[-1]
    assert (tokenize.truncate_prompt_tokens, tokenize.truncation_side) == (7, "left")
    await whole(client, mesh, PLAIN, truncate_prompt_tokens=7, truncation_side="right")
    assert mesh.tokenizer.received[-1].truncation_side == "right"


@pytest.mark.parametrize("interval", [1, 4])
async def test_an_interval_counts_tokens_after_the_first(
    mesh: BackEnd, client: httpx.AsyncClient, interval: int
) -> None:
    fields = {"stream_interval": interval, "max_tokens": 9, "return_token_ids": True}
    events = await chunks(client, mesh, PLAIN, **fields)
    sizes = [len(event["choices"][0]["token_ids"]) for event in events]
    assert sizes == ([1] * 9 if interval == 1 else [1, 4, 4])


async def test_tokens_are_shown_as_ids_on_request(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    fields = {"return_tokens_as_token_ids": True, "return_token_ids": True, "max_tokens": 3}
    chat = (await whole(client, mesh, CHAT, logprobs=True, **fields))["choices"][0]
    shown = chat["logprobs"]["content"]
    assert [each["token"] for each in shown] == [f"token_id:{each}" for each in chat["token_ids"]]
    assert bytes(shown[0]["bytes"]).decode() == shown[0]["token"]
    plain = (await whole(client, mesh, PLAIN, logprobs=0, **fields))["choices"][0]
    assert plain["logprobs"]["tokens"] == [f"token_id:{each}" for each in plain["token_ids"]]


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_an_operator_can_turn_on_usage_and_token_ids(
    bus_settings: BusSettings, redis_settings: RedisSettings, path: str
) -> None:
    gateway: dict[str, Any] = {"force_include_usage": True, "return_tokens_as_token_ids": True}
    logprobs: dict[str, Any] = {"logprobs": True} if path == CHAT else {"logprobs": 0}
    async with (
        BackEnd(bus_settings, redis_settings, **gateway) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=10) as client,
    ):
        events = await chunks(client, mesh, path, max_tokens=3, **logprobs)
        assert all(event["usage"] for event in events)
        assert events[-1]["choices"] == []
        assert '"token_id:' in json.dumps(events)
        unwanted = {"stream_options": {"include_usage": False}}
        events = await chunks(client, mesh, path, max_tokens=3, **unwanted)
        assert all(event["usage"] for event in events)
        plain = await chunks(
            client, mesh, path, max_tokens=3, return_tokens_as_token_ids=False, **logprobs
        )
        assert '"token_id:' not in json.dumps(plain)


async def test_priority_salt_and_bad_words_reach_scheduler_tokenizer_and_worker(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    fields = {"priority": -3, "cache_salt": "mine", "bad_words": ["no", "never"]}
    await whole(client, mesh, CHAT, **fields)
    generate, place = mesh.workers[0].generates[0], mesh.scheduler.received[0]
    assert (generate.priority, place.priority, generate.cache_salt) == (-3, -3, "mine")
    assert mesh.tokenizer.received[0].cache_salt == "mine"
    wanted = [fake_tokenizer().encode(word).ids for word in ("no", "never")]
    assert generate.sampling.bad_words_ids == wanted


async def test_a_placement_says_whether_there_is_a_grammar(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    await whole(client, mesh, PLAIN)
    await whole(client, mesh, PLAIN, structured_outputs={"regex": "[a-z]+"})
    assert [each.has_grammar for each in mesh.scheduler.received] == [False, True]


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_harmless_values_of_fields_that_are_not_served_pass(
    mesh: BackEnd, client: httpx.AsyncClient, path: str
) -> None:
    fields = {
        "user": "me",
        "metadata": {"a": "b"},
        "session_id": "s",
        "service_tier": "default",
        "vllm_xargs": None,
        "kv_transfer_params": None,
        "ec_transfer_params": {},
        "watermarking": False,
        "mm_payload": "tensors",
        "return_mm_kwargs": False,
        "return_token_offsets": True,
        "routed_experts_prompt_start": 0,
        "use_beam_search": False,
        "length_penalty": 1.0,
    }
    await whole(client, mesh, path, **fields)
