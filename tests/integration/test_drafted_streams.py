"""Drafts in a whole mesh: every response is the same with them and without."""

from typing import Any

import httpx
import pytest

from tests.fakes.demo_mesh import demo_mesh
from tests.servers import Server
from tokenmesh.engine.speculate.adaptive import StepCost

TEXT = "Say it again and again: the cat sat on the mat, the cat sat on the mat, the cat sat."
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "top_p": 0.9},
    "choices": {"n": 3},
    "penalties": {"frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "stop strings": {"stop": ["the c", "."], "temperature": 0},
    "log-probabilities": {"logprobs": True, "top_logprobs": 2},
    "bad words": {"bad_words": [" the"]},
    "a grammar": {"structured_outputs": {"regex": "(the cat ){3,8}sat"}},
}


async def responses(client: httpx.AsyncClient) -> dict[Any, Any]:
    """Ask for each kind twice: the second time the tenant's answers are known."""
    found: dict[Any, Any] = {}
    for again in (1, 2):
        for number, (kind, fields) in enumerate(KINDS.items()):
            body = {
                "model": "demo",
                "messages": [{"role": "user", "content": TEXT}],
                "max_tokens": 40,
                "seed": number,
                **fields,
            }
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            answer = response.json()
            found[kind, again] = answer["choices"]
            found[kind, again, "tokens"] = answer["usage"]["completion_tokens"]
            found[kind, again, "details"] = answer["usage"]["completion_tokens_details"] or {}
    return found


def without_details(found: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in found.items() if key[-1] != "details"}


@pytest.mark.parametrize("method", ["ngram", "suffix"])
async def test_responses_are_the_same_with_drafts(
    nats_server: Server, redis_server: Server, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    # drafts of a model this small cost more than they save: here they cost nothing
    monkeypatch.setattr(StepCost, "is_known", lambda self, num_rows: True)
    monkeypatch.setattr(StepCost, "factor", lambda self, num_rows, num_drafts: 1.0)
    async with demo_mesh(nats_server, redis_server) as client:
        expected = await responses(client)
        (entry,) = (await client.get("/v1/models")).json()["data"]
        assert entry["speculative_config"] is None
    config = {"method": method, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    async with demo_mesh(nats_server, redis_server, model={"speculative_config": config}) as client:
        found = await responses(client)
        (entry,) = (await client.get("/v1/models")).json()["data"]
        assert entry["speculative_config"] == {"method": method, "num_speculative_tokens": 8}
    assert without_details(found) == without_details(expected)
    details = [value for key, value in found.items() if key[-1] == "details"]
    accepted = sum(each.get("accepted_prediction_tokens", 0) for each in details)
    rejected = sum(each.get("rejected_prediction_tokens", 0) for each in details)
    assert accepted > 20
    assert rejected > 0
    unknown = [value for key, value in expected.items() if key[-1] == "details"]
    assert not any("accepted_prediction_tokens" in each for each in unknown)
