"""prompt_embeds over HTTP: a tensor becomes a prompt whose embeddings the worker fetches."""

import base64
import io
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save

from tests.fakes.back_end import MAX_MODEL_LEN, BackEnd
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.tensor_blob import decode
from tokenmesh.shared.tokens import unpack_ids

PATH = "/v1/completions"
TENSOR = torch.arange(12, dtype=torch.float32).view(3, 4)


def encoded(tensor: torch.Tensor) -> str:
    """As vLLM's clients do it."""
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.fixture
async def mesh(bus_settings: BusSettings, redis_settings: RedisSettings) -> AsyncIterator[BackEnd]:
    async with BackEnd(bus_settings, redis_settings, prompt_embeds=True) as back_end:
        yield back_end


def ask(mesh: BackEnd, **fields: Any) -> dict[str, Any]:
    return {"model": mesh.model, "prompt_embeds": encoded(TENSOR), "max_tokens": 4, **fields}


async def test_a_tensor_is_a_prompt_of_as_many_tokens(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    response = await client.post(PATH, json=ask(mesh, n=2, cache_salt="mine"))
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["prompt_tokens"] == 3
    for generate in mesh.workers[0].generates:
        (item,) = generate.media
        assert (item.kind, item.offset, item.length) == ("embeds", 0, 3)
        assert item.embeddings is not None
        blob = decode(await mesh.blobs.get(item.embeddings))
        assert (blob.dtype, blob.shape) == ("float32", (3, 4))
        assert bytes(blob.data) == TENSOR.numpy().tobytes()
        assert len(unpack_ids(generate.prompt_ids)) == 3
        assert generate.cache_salt == f"prompt_embeds:{item.content_hash}:mine"


async def test_tensors_come_before_prompts(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    half = base64.b64encode(save({"x": TENSOR.half()})).decode()
    body = ask(mesh, prompt_embeds=[encoded(TENSOR[:2]), half], prompt=["Hi", "Ho"])
    answer = (await client.post(PATH, json=body)).json()
    assert [each["index"] for each in answer["choices"]] == [0, 1, 2, 3]
    by_id = {each.request_id[-1]: each for each in mesh.workers[0].generates}
    assert [len(by_id[index].media) for index in "0123"] == [1, 1, 0, 0]
    assert [by_id[index].media[0].length for index in "01"] == [2, 3]
    salts = {by_id[index].cache_salt for index in "01"}
    assert len(salts) == 2
    assert by_id["2"].cache_salt is None


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt_embeds": "?"}, "prompt_embeds"),
    ({"prompt_embeds": base64.b64encode(b"no tensor").decode()}, "prompt_embeds"),
    ({"prompt_embeds": encoded(TENSOR.T)}, "prompt_embeds"),
    ({"prompt_embeds": encoded(TENSOR.view(4, 3))}, "prompt_embeds"),
    ({"prompt_embeds": encoded(TENSOR.view(12))}, "prompt_embeds"),
    ({"prompt_embeds": encoded(TENSOR[:0])}, "prompt_embeds"),
    ({"prompt_embeds": encoded(TENSOR / 0)}, "prompt_embeds"),
    ({"prompt_embeds": [encoded(TENSOR), encoded(TENSOR.long())]}, "prompt_embeds[1]"),
    ({"prompt_embeds": []}, "prompt"),
    ({"prompt_embeds": 7}, "prompt_embeds"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
    ({"prompt_embeds": encoded(torch.ones(MAX_MODEL_LEN, 4))}, "prompt"),
]


async def test_a_wrong_tensor_is_refused_by_name(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    for fields, param in BAD:
        response = await client.post(PATH, json=ask(mesh, **fields))
        assert response.status_code == 400, (fields, response.text)
        assert response.json()["error"]["param"] == param, response.text
    assert (await client.post(PATH, json=ask(mesh))).status_code == 200


async def test_tensors_are_accepted_only_with_the_setting(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        BackEnd(bus_settings, redis_settings) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        error = (await client.post(PATH, json=ask(mesh))).json()["error"]
        assert (error["code"], error["param"]) == ("not_supported", "prompt_embeds")
