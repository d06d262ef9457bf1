"""Scores by the next token of a model that generates, as vLLM's route has them."""

import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.fakes.back_end import MAX_MODEL_LEN, BackEnd, fake_tokenizer
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.tokens import unpack_ids

PATH = "/generative_scoring"
LABELS = [3, 5, 4]


@pytest.fixture
async def mesh(bus_settings: BusSettings, redis_settings: RedisSettings) -> AsyncIterator[BackEnd]:
    """Its worker's log-probability of a token is the token's negative id."""
    async with BackEnd(bus_settings, redis_settings) as back_end:
        yield back_end


def asked(mesh: BackEnd, **fields: Any) -> dict[str, Any]:
    shared = {"model": mesh.model, "query": "Is it?", "items": [" Yes.", " No."]}
    return {**shared, "label_token_ids": LABELS, **fields}


async def score(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
    response = await client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def prompts(mesh: BackEnd) -> list[list[int]]:
    return sorted(unpack_ids(each.prompt_ids) for each in mesh.workers[0].generates)


def ids_of(text: str, *, special: bool = False) -> list[int]:
    ids: list[int] = fake_tokenizer().encode(text, add_special_tokens=special).ids
    return ids


async def test_the_score_is_the_probability_of_the_first_label(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    answer = await score(client, asked(mesh))
    assert answer["id"].startswith("generative-scoring-")
    assert (answer["object"], answer["model"]) == ("list", mesh.model)
    expected = math.exp(-3) / sum(math.exp(-each) for each in LABELS)
    for index, each in enumerate(answer["data"]):
        assert (each["index"], each["object"]) == (index, "score")
        assert each["score"] == pytest.approx(expected)
    wanted = [ids_of("Is it?", special=True) + ids_of(item) for item in (" Yes.", " No.")]
    assert prompts(mesh) == sorted(wanted)
    usage = answer["usage"]
    assert usage["prompt_tokens"] == sum(map(len, wanted))
    assert usage["completion_tokens"] == 2
    assert {each.sampling.max_tokens for each in mesh.workers[0].generates} == {1}


async def test_without_softmax_it_is_that_of_the_whole_vocabulary(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    answer = await score(client, asked(mesh, apply_softmax=False, label_token_ids=[7, 7]))
    assert [each["score"] for each in answer["data"]] == [pytest.approx(math.exp(-7))] * 2


async def test_items_may_be_ids_and_come_first(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    body = asked(mesh, query=[8, 9], items=[[10], [11, 12]], item_first=True)
    await score(client, body)
    assert prompts(mesh) == [[10, 8, 9], [11, 12, 8, 9]]


async def test_a_prompt_that_is_too_long_is_cut_at_its_end(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    await score(client, asked(mesh, query=[8] * 250, items=[[9] * 100]))
    assert prompts(mesh) == [[8] * 250 + [9] * (MAX_MODEL_LEN - 251)]


@pytest.mark.parametrize(
    ("fields", "status", "problem"),
    [
        ({"items": []}, 400, "items: "),
        ({"items": ["a", [1]]}, 400, "items"),
        ({"items": [[]]}, 400, "items[0] is an empty list"),
        ({"items": ["a"] * 1025}, 400, "items holds 1025 entries, at most 1024"),
        ({"query": [10**6]}, 400, "query"),
        ({"query": [8] * MAX_MODEL_LEN}, 400, "This model's maximum"),
        ({"label_token_ids": []}, 400, "label_token_ids: "),
        ({"label_token_ids": [10**6]}, 400, "label_token_ids"),
        ({"label_token_ids": list(range(200))}, 400, "label_token_ids"),
        ({"stream": True}, 400, "stream "),
        ({"model": "none"}, 404, "The model `none`"),
    ],
)
async def test_errors_name_the_fields_of_the_request(
    mesh: BackEnd, client: httpx.AsyncClient, fields: dict[str, Any], status: int, problem: str
) -> None:
    response = await client.post(PATH, json=asked(mesh, **fields))
    assert response.status_code == status
    assert response.json()["error"]["message"].startswith(problem)
    assert not mesh.workers[0].generates


async def test_a_query_that_its_items_multiply_is_refused_before_it_is_copied(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        BackEnd(bus_settings, redis_settings, max_json_ids=1000) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=10) as client,
    ):
        response = await client.post(PATH, json=asked(mesh, query=[8] * 100, items=[[9]] * 10))
    assert response.status_code == 413
    message = response.json()["error"]["message"]
    assert "holds 1010 token ids, at most 1000 (gateway.max_json_ids)" in message
    assert not mesh.workers[0].generates


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/systemone", "structured_outputs.choice"),
        ("/v1/decisions", "structured_outputs.choice"),
        ("/collective_rpc", "workers run no code of others"),
        ("/pause", "/sleep and /wake_up"),
        ("/reset_prefix_cache", "cache_salt"),
    ],
)
async def test_a_route_of_vllm_that_is_not_served_says_what_to_do(
    mesh: BackEnd, client: httpx.AsyncClient, path: str, hint: str
) -> None:
    response = await client.post(path, json={})
    assert response.status_code == 404
    message = response.json()["error"]["message"]
    assert message.startswith(f"no route matches POST {path}, a route of vLLM: ")
    assert hint in message
