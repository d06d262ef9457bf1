"""Drafts in a whole mesh: every response is the same with them and without."""

import json
from typing import Any

import httpx
import pytest

from tests.fakes.demo_mesh import DEMO, demo_mesh
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


_undrafted: dict[Any, Any] = {}
"""The responses without drafts, once one of the tests has asked for them."""


async def undrafted(nats_server: Server, redis_server: Server) -> dict[Any, Any]:
    if not _undrafted:
        async with demo_mesh(nats_server, redis_server) as client:
            _undrafted.update(await responses(client))
            (entry,) = (await client.get("/v1/models")).json()["data"]
            assert entry["speculative_config"] is None
    return _undrafted


def without_details(found: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in found.items() if key[-1] != "details"}


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
async def test_responses_are_the_same_with_drafts(
    nats_server: Server, redis_server: Server, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    expected = await undrafted(nats_server, redis_server)
    # drafts of a model this small cost more than they save: here they cost nothing
    monkeypatch.setattr(StepCost, "is_known", lambda self, num_rows: True)
    monkeypatch.setattr(StepCost, "factors", lambda self, num_rows, numbers: [1.0] * len(numbers))
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 8}
    if method == "draft_model":
        # the model drafts for itself: all but what depends on penalties and grammars is right
        config["model"] = str(DEMO)
    else:
        config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
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


PREDICTED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "choices": {"n": 3, "logprobs": True},
    "penalties": {"frequency_penalty": 0.7},
    "a grammar": {"structured_outputs": {"regex": "(the cat ){3,8}sat"}},
    "a stream": {"stream": True, "stream_options": {"include_usage": True}},
    "tools": {
        "tools": [{"type": "function", "function": {"name": "get", "parameters": {}}}],
        "tool_choice": "required",
    },
}


async def predicted(client: httpx.AsyncClient, prediction: dict[str, Any]) -> list[Any]:
    """The answer to each kind: what it says, and its usage."""
    found: list[Any] = []
    for number, fields in enumerate(PREDICTED.values()):
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": TEXT}],
            "max_tokens": 40,
            "seed": number,
            **prediction,
            **fields,
        }
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        assert "x-tokenmesh-warning" not in response.headers
        if "stream" in fields:
            lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
            chunks = [json.loads(line) for line in lines]
            deltas = [each["choices"][0]["delta"] for each in chunks if each["choices"]]
            text = "".join(each.get("content") or "" for each in deltas)
            found.append((text, chunks[-1]["usage"]))
            continue
        answer = response.json()
        for choice in answer["choices"]:
            for call in choice["message"].get("tool_calls") or ():
                del call["id"]
        found.append((answer["choices"], answer["usage"]))
    return found


async def test_a_prediction_brings_drafts_without_a_setting(
    nats_server: Server, redis_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepCost, "is_known", lambda self, num_rows: True)
    monkeypatch.setattr(StepCost, "factors", lambda self, num_rows, numbers: [1.0] * len(numbers))
    async with demo_mesh(nats_server, redis_server) as client:
        expected = await predicted(client, {})
        text = expected[0][0][0]["message"]["content"]
        parts = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
        for content in (text, parts, "the cat sat " * 9):
            given = {"prediction": {"type": "content", "content": content}}
            found = await predicted(client, given)
            assert [each for each, _ in found] == [each for each, _ in expected]
            details = [usage["completion_tokens_details"] for _, usage in found]
            # each of them has the numbers, also one without a draft
            assert all("accepted_prediction_tokens" in each for each in details)
            if content is text:
                accepted = details[0]["accepted_prediction_tokens"]
                assert accepted >= 0.5 * found[0][1]["completion_tokens"]
                assert details[0]["rejected_prediction_tokens"] < 8
        body = {"model": "demo", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}
        body["prediction"] = {"type": "content", "content": "a"}
        beams = {**body, "use_beam_search": True, "n": 2, "temperature": 0}
        response = await client.post("/v1/chat/completions", json=beams)
        assert response.status_code == 200, response.text
        assert "prediction ignored: a beam search" in response.headers["x-tokenmesh-warning"]
        body["prediction"] = {"type": "content", "content": "a" * 1_500_000}
        response = await client.post("/v1/chat/completions", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (413, "prediction")


async def test_a_model_without_drafts_answers_and_warns(
    nats_server: Server, redis_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmesh.services.worker_svc.main.make_proposer", no_proposer)
    async with demo_mesh(nats_server, redis_server) as client:
        body = {"model": "demo", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}
        body["prediction"] = {"type": "content", "content": "the cat"}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        warning = "prediction ignored: the model demo computes one token of a stream at a time"
        assert warning in response.headers["x-tokenmesh-warning"]
        assert "accepted_prediction_tokens" not in response.text


def no_proposer(config: object, runner: object) -> None:
    """Return None, as for a model that takes no drafts."""
