"""prompt_embeds over HTTP: a tensor becomes a prompt whose embeddings the worker fetches."""

import base64
import io
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import torch
from safetensors.torch import save

from tests.fakes.back_end import MAX_MODEL_LEN, BackEnd
from tests.fakes.pool_mesh import PoolMesh
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages.media import EMBEDS, MediaItem
from tokenmesh.shared.messages.tokenize import ChatPrompt
from tokenmesh.shared.tensor_blob import decode
from tokenmesh.shared.tokens import unpack_ids

PATH = "/v1/completions"
TENSOR = torch.arange(12, dtype=torch.float32).view(3, 4)


def encoded(tensor: torch.Tensor) -> str:
    return base64.b64encode(save({"x": tensor.contiguous()})).decode()


def pickled(tensor: torch.Tensor) -> str:
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
        assert generate.cache_salt == "mine"


async def test_a_batch_of_one_is_one_tensor(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    for given in (TENSOR, TENSOR[None]):
        body = ask(mesh, prompt_embeds=encoded(given))
        assert (await client.post(PATH, json=body)).json()["usage"]["prompt_tokens"] == 3
    one, other = (generate.media[0] for generate in mesh.workers[0].generates)
    assert one == other
    body = ask(mesh, prompt_embeds=encoded(torch.stack([TENSOR, TENSOR])))
    assert (await client.post(PATH, json=body)).status_code == 400


async def test_tensors_come_before_prompts(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    half = base64.b64encode(save({"x": TENSOR.half()})).decode()
    body = ask(mesh, prompt_embeds=[encoded(TENSOR[:2]), half], prompt=["Hi", "Ho"])
    answer = (await client.post(PATH, json=body)).json()
    assert [each["index"] for each in answer["choices"]] == [0, 1, 2, 3]
    by_id = {each.request_id[-1]: each for each in mesh.workers[0].generates}
    assert [len(by_id[index].media) for index in "0123"] == [1, 1, 0, 0]
    assert [by_id[index].media[0].length for index in "01"] == [2, 3]
    assert len({by_id[index].media[0].content_hash for index in "01"}) == 2


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt_embeds": "?"}, "prompt_embeds"),
    ({"prompt_embeds": base64.b64encode(b"no tensor").decode()}, "prompt_embeds"),
    ({"prompt_embeds": pickled(TENSOR)}, "prompt_embeds"),
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


CHATS = "/v1/chat/completions"


def part(tensor: torch.Tensor = TENSOR, **fields: Any) -> dict[str, Any]:
    return {"type": "prompt_embeds", "data": encoded(tensor), **fields}


def chat(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


async def test_a_tensor_may_be_a_part_of_a_message(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    """The tokenizer gets its key; of what a client calls so nothing is left."""
    forged = part(length=7, mark="x", text="y")
    body = {"model": mesh.model, "messages": [chat("Hi", forged, "Ho"), chat(part(TENSOR[:1]))]}
    await client.post(PATH, json=ask(mesh))
    (stored,) = mesh.workers[0].generates[0].media
    item = msgspec.structs.replace(stored, offset=1)
    mesh.tokenizer.media = [item]
    for fields in ({"n": 2}, {"stream": True, "stream_options": {"include_usage": True}}):
        response = await client.post(CHATS, json={**body, **fields})
        assert response.status_code == 200, response.text
    prompt = mesh.tokenizer.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    first, second = msgspec.json.decode(prompt.messages_json)
    assert first["content"][0] == "Hi"
    kind = {"type": "prompt_embeds"}
    assert first["content"][1] == {**kind, "data": f"blob:{stored.pixels}", "length": 3}
    assert second["content"][0]["length"] == 1
    # no encoder is asked for what a client has embedded
    assert [generate.media for generate in mesh.workers[0].generates[1:]] == [[item]] * 3
    for path in ("/tokenize", "/v1/messages/count_tokens"):
        count = (await client.post(path, json=body)).json()
        assert ("count" in count) == (path == "/tokenize"), count


BAD_PARTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"data": "?"}, {}, "messages"),
    ({"data": ""}, {}, "messages"),
    ({"data": None}, {}, "messages"),
    ({"data": "blob:forged", "length": 3}, {}, "messages"),
    ({"data": encoded(TENSOR.view(4, 3))}, {}, "messages"),
    ({}, {"prompt_logprobs": 1}, "prompt_logprobs"),
    ({}, {"return_prompt_text": True}, "return_prompt_text"),
]


async def test_a_wrong_part_is_refused_by_its_place(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    for fields, others, param in BAD_PARTS:
        body = {"model": mesh.model, "messages": [chat("Hi", part(**fields))], **others}
        response = await client.post(CHATS, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), (fields, response.text)
        if not others:
            assert "messages[0].content[1].data" in error["message"]


async def test_parts_that_are_tensors_need_the_setting_in_every_route(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        BackEnd(bus_settings, redis_settings) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        body = {"model": mesh.model, "messages": [chat(part())]}
        for path in (CHATS, "/tokenize"):
            error = (await client.post(path, json=body)).json()["error"]
            assert (error["code"], error["param"]) == ("not_supported", "messages"), error
            assert "--enable-prompt-embeds" in error["message"]


async def test_chats_that_are_pooled_take_tensors(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    card = {"hidden_size": 4}
    async with (
        PoolMesh(bus_settings, redis_settings, "embed", card=card, prompt_embeds=True) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        key = BlobKey("k")
        item = MediaItem(
            kind=EMBEDS, content_hash=key, offset=1, length=3, pixels=key, embeddings=key
        )
        mesh.tokenizer.media = [item]
        for path in ("/v1/embeddings", "/pooling"):
            response = await client.post(path, json={"messages": [chat("Hi", part())]})
            assert response.status_code == 200, response.text
        assert [each.media for pool in mesh.pools for each in pool.items] == [[item]] * 2
