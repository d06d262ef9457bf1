"""A streamed completion with echo has the same content as one that is not streamed."""

import json
from collections import defaultdict
from typing import Any

import httpx
import pytest

from tests.fakes.back_end import BackEnd

PROMPTS = ["Once upon", "In the beginning"]
SHAPE = ("text_offset", "token_logprobs", "tokens", "top_logprobs")


async def ask(mesh: BackEnd, **fields: Any) -> httpx.Response:
    body = {"model": mesh.model, "prompt": PROMPTS, "n": 2, "echo": True, "seed": 1, **fields}
    async with httpx.AsyncClient(base_url=mesh.url, timeout=10) as client:
        response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response


def joined(response: httpx.Response) -> dict[int, dict[str, list[Any]]]:
    """Join what each choice's chunks say."""
    found: dict[int, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                shown = found[choice["index"]]
                shown["text"].append(choice["text"])
                shown["token_ids"].extend(choice.get("token_ids") or ())
                for name in SHAPE:
                    shown[name].extend((choice["logprobs"] or {}).get(name, ()))
    return found


@pytest.mark.parametrize("max_tokens", [4, 0])
async def test_log_probabilities_of_late_prompts_are_sent_too(
    mesh: BackEnd, max_tokens: int
) -> None:
    fields = {"logprobs": 1, "return_token_ids": True, "max_tokens": max_tokens}
    whole = (await ask(mesh, **fields)).json()["choices"]
    # The second prompt finds its worker when the first one has begun to speak.
    mesh.scheduler.delays_s = [0.0, 0.1]
    streamed = joined(await ask(mesh, stream=True, **fields))
    assert len(whole) == len(streamed) == 4
    for choice in whole:
        shown = streamed[choice["index"]]
        assert "".join(shown["text"]) == choice["text"]
        assert shown["token_ids"] == choice["token_ids"]
        assert {name: shown[name] for name in SHAPE} == choice["logprobs"]
        assert None not in shown["token_logprobs"][1:]


async def test_without_log_probabilities_the_echo_waits_for_nothing(mesh: BackEnd) -> None:
    mesh.scheduler.delays_s = [0.0, 0.1]
    streamed = joined(await ask(mesh, stream=True, max_tokens=4))
    first = [shown["text"][0] for _, shown in sorted(streamed.items())]
    assert first == [prompt for prompt in PROMPTS for _ in range(2)]
