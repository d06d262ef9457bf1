"""use_beam_search through a real gateway, with workers that send log-probabilities."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.fakes.back_end import BackEnd, eos_id, fake_tokenizer
from tests.fakes.beam_reference import next_token, reference
from tests.fakes.worker import CACHED_TOKENS
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.messages import Generate
from tokenmesh.shared.messages.tokens import TokenLogprobs
from tokenmesh.shared.tokens import unpack_ids

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
PROMPT = [20, 21, 22]
SEED = 5
END = frozenset({eos_id()})


def say(generate: Generate) -> TokenLogprobs:
    """The worker's distribution after a prompt and what a beam has added."""
    beam = tuple(unpack_ids(generate.prompt_ids)[len(PROMPT) :])
    return next_token(SEED, beam, generate.sampling.logprobs or 0)


@pytest.fixture
async def mesh(bus_settings: BusSettings, redis_settings: RedisSettings) -> AsyncIterator[BackEnd]:
    async with BackEnd(bus_settings, redis_settings, script=lambda _: [1]) as back_end:
        back_end.workers[0].distribution = say
        yield back_end


def ask(mesh: BackEnd, **fields: Any) -> dict[str, Any]:
    return {
        "model": mesh.model,
        "prompt": PROMPT,
        "max_tokens": 5,
        "n": 3,
        "use_beam_search": True,
        "return_token_ids": True,
        **fields,
    }


def choices_of(answer: dict[str, Any]) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(each["token_ids"]), each["finish_reason"]) for each in answer["choices"]]


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.5])
async def test_the_choices_are_the_best_beams_in_order(
    mesh: BackEnd, client: httpx.AsyncClient, penalty: float
) -> None:
    body = ask(
        mesh,
        length_penalty=penalty,
        stop_token_ids=[3],
        temperature=0,
        response_format={"type": "text"},
    )
    answer = (await client.post(PLAIN, json=body)).json()
    expected = reference(SEED, 3, len(PROMPT), 5, penalty, END | {3})
    assert choices_of(answer) == [(ids, finish) for ids, _, finish in expected]
    for choice in answer["choices"]:
        ids, is_end = choice["token_ids"], choice["finish_reason"] == "stop"
        assert choice["text"] == fake_tokenizer().decode(ids[: len(ids) - is_end])
        assert choice["stop_reason"] == (3 if ids[-1] == 3 else None)
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(PROMPT)
    assert usage["completion_tokens"] == sum(len(ids) for ids, _, _ in expected)
    assert usage["prompt_tokens_details"]["cached_tokens"] == CACHED_TOKENS


async def test_each_step_requests_one_token_of_every_beam(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    assert (await client.post(PLAIN, json=ask(mesh))).status_code == 200
    generates = mesh.workers[0].generates
    lengths = [len(unpack_ids(each.prompt_ids)) for each in generates]
    assert lengths == sorted([3, *(3 + step for step in range(1, 5) for _ in range(3))])
    for each in generates:
        assert (each.sampling.max_tokens, each.sampling.logprobs) == (1, 6)
    assert [each.num_streams for each in mesh.scheduler.received] == [1, 3, 3, 3, 3]


async def test_log_probabilities_are_those_of_the_beam(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    body = ask(mesh, logprobs=1, return_tokens_as_token_ids=True)
    answer = (await client.post(PLAIN, json=body)).json()
    for choice, (ids, total, _) in zip(
        answer["choices"], reference(SEED, 3, 3, 5, 1.0, END), strict=True
    ):
        shown = choice["logprobs"]
        assert shown["tokens"] == [f"token_id:{each}" for each in ids]
        assert sum(shown["token_logprobs"]) == pytest.approx(total)
        for position, tops in enumerate(shown["top_logprobs"]):
            best = next_token(SEED, ids[:position], 1)
            assert tops[f"token_id:{best.token_id}"] == best.logprob


async def test_a_chat_ends_a_beam_with_the_models_own_end(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    def ending(generate: Generate) -> TokenLogprobs:
        return TokenLogprobs(40, -0.1, 1, [40, eos_id()], [-0.1, -2.0])

    mesh.workers[0].distribution = ending
    body = ask(mesh, messages=[{"role": "user", "content": "Hi"}], n=2, max_tokens=2)
    del body["prompt"]
    answer = (await client.post(CHAT, json=body)).json()
    assert choices_of(answer) == [((40, 40), "length"), ((eos_id(),), "stop")]
    word = fake_tokenizer().decode([40])
    assert [each["message"]["content"] for each in answer["choices"]] == [word * 2, ""]
    ignoring = (await client.post(CHAT, json={**body, "ignore_eos": True})).json()
    assert [each["finish_reason"] for each in ignoring["choices"]] == ["length", "length"]


async def test_several_prompts_are_searched_side_by_side(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    body = ask(mesh, prompt=[PROMPT, [30, 31, 32]], n=2)
    answer = (await client.post(PLAIN, json=body)).json()
    expected = [(ids, f) for ids, _, f in reference(SEED, 2, 3, 5, 1.0, END)]
    assert choices_of(answer) == expected * 2
    assert [each["index"] for each in answer["choices"]] == [0, 1, 2, 3]


async def test_a_search_continues_when_its_worker_dies(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    expected = [(ids, f) for ids, _, f in reference(SEED, 3, 3, 5, 1.0, END)]
    (await mesh.add_worker()).distribution = say
    mesh.workers[0].faults.dies_after = 2
    answer = await client.post(PLAIN, json=ask(mesh))
    assert answer.status_code == 200, answer.text
    assert choices_of(answer.json()) == expected
    assert mesh.workers[1].generates


async def test_a_worker_that_fails_is_an_error_of_the_request(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    mesh.workers[0].distribution = None
    mesh.scheduler.is_full = True
    assert (await client.post(PLAIN, json=ask(mesh))).status_code == 429
    mesh.scheduler.is_full = False
    mesh.workers[0].distribution = lambda _: TokenLogprobs(1, -1.0, 1)
    assert (await client.post(PLAIN, json=ask(mesh, max_tokens=1))).status_code >= 500


async def test_a_disconnected_client_ends_the_search(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    mesh.step_s = 0.05
    slow = await mesh.add_worker()
    slow.distribution = say
    mesh.scheduler.workers = [slow]
    body = ask(mesh, max_tokens=200, ignore_eos=True)
    request = asyncio.create_task(client.post(PLAIN, json=body))
    await mesh.until(lambda: len(slow.generates) > 3)
    request.cancel()
    # Between two steps there is no stream for a moment either.
    num_asked = 0
    while len(mesh.gateway.core.mesh.streams) or num_asked < len(slow.generates):
        num_asked = len(slow.generates)
        await asyncio.sleep(0.5)
    assert num_asked < 600


BAD: list[tuple[dict[str, Any], str]] = [
    ({"stream": True}, "stream"),
    ({"n": 17}, "n"),
    ({"length_penalty": 11}, "length_penalty"),
    ({"length_penalty": "one"}, "length_penalty"),
    ({"use_beam_search": "maybe"}, "use_beam_search"),
    ({"use_beam_search": False, "length_penalty": 0.5}, "length_penalty"),
    ({"top_p": 0.5}, "top_p"),
    ({"top_k": 5}, "top_k"),
    ({"stop": ["x"]}, "stop"),
    ({"min_tokens": 2}, "min_tokens"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"repetition_detection": {"max_pattern_size": 3, "min_count": 2}}, "repetition_detection"),
]


async def test_fields_that_a_search_cannot_honor_are_refused_by_name(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    for fields, param in BAD:
        response = await client.post(PLAIN, json=ask(mesh, **fields))
        assert response.status_code == 400, (fields, response.text)
        assert response.json()["error"]["param"] == param
