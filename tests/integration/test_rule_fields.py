"""Fields about an output's tokens over HTTP: to the worker, and back to the client."""

import json
from typing import Any

import httpx
import pytest

from tests.fakes.back_end import BackEnd, fake_tokenizer
from tokenmesh.services.gateway.apis.openai import suffix as fill_in
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.messages.sampling import RepetitionRule, ThinkingBudget
from tokenmesh.shared.tokens import unpack_ids

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"


def ask(mesh: BackEnd, path: str, **fields: Any) -> dict[str, Any]:
    own = {"prompt": "Hi"} if path == PLAIN else {"messages": [{"role": "user", "content": "Hi"}]}
    return {"model": mesh.model, "max_tokens": 6, **own, **fields}


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_a_loop_ends_a_choice_with_its_own_reason(
    mesh: BackEnd, client: httpx.AsyncClient, path: str
) -> None:
    asked = {"max_pattern_size": 4, "min_count": 3}
    body = ask(mesh, path, repetition_detection=asked, n=2)
    answer = (await client.post(path, json=body)).json()
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "repetition"
        assert choice["stop_reason"] == "repetition_detected"
    rules = [each.sampling.repetition for each in mesh.workers[0].generates]
    assert rules == [RepetitionRule(max_size=4, min_size=1, min_count=3)] * 2
    text = (await client.post(path, json={**body, "stream": True})).text
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line[6:7] == "{"]
    ends = [each["finish_reason"] for event in events for each in event["choices"]]
    assert ends.count("repetition") == 2


@pytest.mark.parametrize("asked", [None, {}, {"max_pattern_size": 0, "min_count": 9}])
async def test_a_rule_that_is_off_is_not_sent(
    mesh: BackEnd, client: httpx.AsyncClient, asked: dict[str, int] | None
) -> None:
    body = ask(mesh, PLAIN, repetition_detection=asked)
    assert (await client.post(PLAIN, json=body)).status_code == 200
    assert mesh.workers[0].generates[0].sampling.repetition is None


async def test_a_chat_returns_log_probabilities_of_named_tokens(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    body = ask(mesh, CHAT, logprobs=True, logprob_token_ids=[40, 41])
    content = (await client.post(CHAT, json=body)).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 6
    names = [fake_tokenizer().decode([each]) for each in (40, 41)]
    for entry in content:
        assert [top["token"] for top in entry["top_logprobs"]] == [entry["token"], *names]
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -40.0, -41.0]
    assert mesh.workers[0].generates[0].sampling.logprob_token_ids == [40, 41]


async def test_a_completion_returns_them_after_the_chosen_token(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    fields = {"logprobs": 2, "logprob_token_ids": [40, 41], "return_tokens_as_token_ids": True}
    answer = await client.post(PLAIN, json=ask(mesh, PLAIN, **fields))
    shown = answer.json()["choices"][0]["logprobs"]
    for token, tops in zip(shown["tokens"], shown["top_logprobs"], strict=True):
        assert list(tops.items()) == [(token, -0.5), ("token_id:40", -40.0), ("token_id:41", -41.0)]


async def test_minus_one_returns_all_log_probabilities_without_a_limit(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        BackEnd(bus_settings, redis_settings, max_logprobs=-1) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        fields = {"logprobs": -1, "prompt_logprobs": -1, "max_tokens": 1}
        answer = await client.post(PLAIN, json=ask(mesh, PLAIN, **fields))
        assert answer.status_code == 200, answer.text
        sampling, size = mesh.workers[0].generates[0].sampling, fake_tokenizer().get_vocab_size()
        assert (sampling.logprobs, sampling.prompt_logprobs) == (size, size)
        chat = ask(mesh, CHAT, logprobs=True, top_logprobs=-1, max_tokens=1)
        assert (await client.post(CHAT, json=chat)).status_code == 200
        assert mesh.workers[0].generates[1].sampling.logprobs == size


async def test_a_budget_reaches_the_worker_with_the_markers(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        BackEnd(bus_settings, redis_settings, describe_ttl_s=0.001) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        mesh.tokenizer.reasoning_parser = "qwen3"
        for path in (CHAT, PLAIN):
            body = ask(mesh, path, thinking_token_budget=5, n=2)
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
        unlimited = await client.post(PLAIN, json=ask(mesh, PLAIN, thinking_token_budget=-1))
        assert unlimited.status_code == 200
        budgets = [each.sampling.thinking for each in mesh.workers[0].generates]
        ids = [fake_tokenizer().encode(text).ids for text in ("<think>", "</think>")]
        wanted = ThinkingBudget(num_tokens=5, start_ids=ids[0], end_ids=ids[1])
        assert budgets == [wanted] * 4 + [None]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_chat_returns_its_prompt_as_text_and_its_tier(
    mesh: BackEnd, client: httpx.AsyncClient, is_stream: bool
) -> None:
    fields = {"return_prompt_text": True, "service_tier": "auto", "session_id": "s"}
    text = (await client.post(CHAT, json=ask(mesh, CHAT, stream=is_stream, **fields))).text
    first = json.loads(text.removeprefix("data: ").split("\n\n")[0])
    assert first["prompt_text"] == 'user: "Hi"\nassistant: '
    assert first["service_tier"] == "default"
    plain = await client.post(PLAIN, json=ask(mesh, PLAIN, stream=is_stream, **fields))
    assert '"service_tier":"default"' in plain.text
    unasked = await client.post(CHAT, json=ask(mesh, CHAT, stream=is_stream))
    assert '"prompt_text":"' not in unasked.text
    assert '"service_tier":"' not in unasked.text


@pytest.mark.parametrize("prompt", ["def f(", fake_tokenizer().encode("def f(").ids])
async def test_a_suffix_follows_the_prompt_between_markers(
    mesh: BackEnd, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, prompt: Any
) -> None:
    markers = fill_in.SuffixMarkers("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    monkeypatch.setattr(fill_in, "FORMATS", (markers,))
    body = ask(mesh, PLAIN, suffix="return x", prompt=prompt)
    assert (await client.post(PLAIN, json=body)).status_code == 200
    ids = unpack_ids(mesh.workers[0].generates[0].prompt_ids)
    wanted = "<|im_start|>def f(<|im_end|>return x<|endoftext|>"
    assert fake_tokenizer().decode(ids, skip_special_tokens=False) == wanted
    refused = await client.post(PLAIN, json={**body, "echo": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")


async def test_a_tokenizer_encodes_a_suffix_once_for_all_prompts(
    mesh: BackEnd, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    markers = fill_in.SuffixMarkers("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    monkeypatch.setattr(fill_in, "FORMATS", (markers,))
    body = ask(mesh, PLAIN, suffix="return x", prompt=[[100, 101]] * 5)
    assert (await client.post(PLAIN, json=body)).status_code == 200
    texts = [each.prompt.text for each in mesh.tokenizer.received if hasattr(each.prompt, "text")]
    assert texts == ["return x"]
    assert len(mesh.workers[0].generates) == 5


async def test_one_of_several_prompts_is_named(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    body = ask(mesh, PLAIN, prompt=["Hi", "x " * 2000])
    error = (await client.post(PLAIN, json=body)).json()["error"]
    assert error["param"] == "prompt[1]"
    assert error["message"].startswith("prompt[1]: ")
