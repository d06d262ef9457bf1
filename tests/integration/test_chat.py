"""Chat completions through a real gateway, with fakes behind it, over HTTP."""

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.fakes.back_end import MAX_MODEL_LEN, BackEnd
from tokenmesh.shared import subjects
from tokenmesh.shared.actor import Actor, Context, handles
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages import Encode, Encoded
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.messages.tokenize import ChatPrompt

TEXT = "Hello from the mesh, na\u00efve caf\u00e9!"


@pytest.fixture
async def mesh(bus_settings: BusSettings, redis_settings: RedisSettings) -> AsyncIterator[BackEnd]:
    async with BackEnd(bus_settings, redis_settings, service_wait_s=0.5) as back_end:
        yield back_end


def ask(mesh: BackEnd, **fields: Any) -> dict[str, Any]:
    return {"model": mesh.model, "messages": [{"role": "user", "content": "Hi"}], **fields}


async def test_a_chat_is_answered(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json=ask(mesh))
    assert response.status_code == 200, response.text
    body = response.json()
    choice = body["choices"][0]
    assert choice["message"]["content"] == TEXT
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert body["id"] == response.headers["x-request-id"]


async def test_an_id_of_the_client_is_the_id_everywhere(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    headers = {"x-request-id": "my-id-7"}
    response = await client.post("/v1/chat/completions", json=ask(mesh), headers=headers)
    assert (response.json()["id"], response.headers["x-request-id"]) == ("my-id-7", "my-id-7")
    assert mesh.workers[0].generates[0].request_id == "my-id-7"
    second = await client.post("/v1/chat/completions", json=ask(mesh, request_id="own"))
    assert second.json()["id"] == "own"


async def test_unknown_fields_are_served_and_named(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    body = ask(mesh, frobnicate=1, **{"bad\nname": 2})
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert response.headers["x-tokenmesh-warning"] == "unknown fields ignored: frobnicate, bad?name"


async def test_sampling_fields_reach_the_worker(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.1,
        "seed": -5,
        "min_tokens": 2,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "logit_bias": {"5": 3, "6": -1000},
        "allowed_token_ids": [9, 8, 8],
        "bad_words": ["no"],
        "max_tokens": 50,
        "priority": 3,
        "cache_salt": "salt",
    }
    response = await client.post("/v1/chat/completions", json=ask(mesh, **fields))
    assert response.status_code == 200, response.text
    generate = mesh.workers[0].generates[0]
    sampling = generate.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.5,
        0.9,
        0,
        0.1,
    )
    penalties = (
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
    )
    assert penalties == (0.2, -0.3, 1.1)
    assert sampling.seed == -5 & (2**63 - 1)
    assert (sampling.min_tokens, sampling.stop_token_ids, sampling.ignore_eos) == (2, [7], True)
    assert sampling.logit_bias == {5: 3, 6: -100}
    assert sampling.allowed_token_ids == [8, 9]
    assert len(sampling.bad_words_ids) == 1
    assert (sampling.max_tokens, generate.priority, generate.cache_salt) == (50, 3, "salt")


async def test_a_models_own_defaults_fill_in(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    mesh.tokenizer.defaults = {"temperature": 0.3, "top_k": 20}
    await client.post("/v1/chat/completions", json=ask(mesh, top_k=5))
    sampling = mesh.workers[0].generates[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.3, 5, 1.0)


async def test_a_chat_may_use_all_the_room_that_is_left(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    body = (await client.post("/v1/chat/completions", json=ask(mesh))).json()
    room = MAX_MODEL_LEN - body["usage"]["prompt_tokens"]
    assert mesh.workers[0].generates[0].sampling.max_tokens == room


async def test_an_alias_serves_the_same_model(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    body = {**ask(mesh), "model": f"{mesh.model}-alias"}
    assert (await client.post("/v1/chat/completions", json=body)).json()["model"] == mesh.model


async def test_prompt_logprobs_and_ids_are_returned_on_request(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    body = ask(mesh, prompt_logprobs=1, return_token_ids=True, n=2)
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    assert answer["prompt_logprobs"][0] is None
    second = answer["prompt_logprobs"][1][str(answer["prompt_token_ids"][1])]
    assert (second["rank"], second["logprob"]) == (1, -0.5)
    assert answer["choices"][1]["token_ids"] == mesh.script(mesh.workers[0].generates[0])


async def test_large_data_uris_travel_as_blobs(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    data = bytes(range(256)) * 128
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    part = {"type": "image_url", "image_url": {"url": uri}}
    message = {"role": "user", "content": [{"type": "text", "text": "What?"}, part]}
    response = await client.post("/v1/chat/completions", json=ask(mesh, messages=[message]))
    assert response.status_code == 200, response.text
    prompt = mesh.tokenizer.received[0].prompt
    assert isinstance(prompt, ChatPrompt)
    sent = json.loads(prompt.messages_json)[0]["content"][1]["image_url"]["url"]
    assert sent.startswith("blob:")
    assert await mesh.blobs.get(BlobKey(sent.removeprefix("blob:"))) == data


async def test_clients_may_not_name_blobs(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    part = {"type": "image_url", "image_url": {"url": "blob:tokenizer:secret"}}
    body = ask(mesh, messages=[{"role": "user", "content": [part]}])
    response = await client.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


async def test_tokens_of_a_prompt_and_a_chat(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    prompt = {"model": mesh.model, "prompt": "The fox", "return_token_strs": True}
    answer = (await client.post("/tokenize", json=prompt)).json()
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), MAX_MODEL_LEN)
    assert len(answer["token_strs"]) == answer["count"]
    text = await client.post("/detokenize", json={"tokens": answer["tokens"], "model": mesh.model})
    assert text.json() == {"prompt": "The fox"}
    chat = await client.post("/tokenize", json=ask(mesh))
    assert chat.json()["count"] > 0


async def test_readiness_names_the_missing_services(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    response = await client.get("/readyz")
    assert response.status_code == 503
    assert response.json()["missing"] == ["tokenizer", "scheduler"]
    assert (await client.get("/livez")).status_code == 200


async def test_metrics_version_and_docs_are_served(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    await client.post("/v1/chat/completions", json=ask(mesh))
    text = (await client.get("/metrics")).text
    assert 'handler="/v1/chat/completions",method="POST",status="200"} 1.0' in text
    assert (await client.get("/version")).json()["version"]
    document = (await client.get("/openapi.json")).json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    reference = body["content"]["application/json"]["schema"]["$ref"]
    assert reference.rpartition("/")[2] in document["components"]["schemas"]


async def test_a_key_guards_everything_but_health(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    digest = hashlib.sha256(b"sk-right").hexdigest()
    async with (
        BackEnd(bus_settings, redis_settings, api_key_hashes=(digest,)) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        for path in ("/v1/models", "/metrics", "/openapi.json", "/traces", "/nowhere"):
            refused = await client.get(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                401,
                "invalid_api_key",
            )
        for path in ("/livez", "/health", "/readyz"):
            assert (await client.get(path)).status_code != 401
        for key, status in (("Bearer sk-wrong", 401), ("sk-right", 401), ("Bearer sk-right", 200)):
            response = await client.post(
                "/v1/chat/completions", json=ask(mesh), headers={"authorization": key}
            )
            assert response.status_code == status


async def test_pages_of_allowed_origins_may_call(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        BackEnd(bus_settings, redis_settings, cors_origins=("https://a.example",)) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        headers = {"origin": "https://a.example"}
        response = await client.post("/v1/chat/completions", json=ask(mesh), headers=headers)
        assert response.headers["access-control-allow-origin"] == "https://a.example"


async def test_a_request_is_measured(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    await client.post("/v1/chat/completions", json=ask(mesh, n=2, stream=True))
    text = (await client.get("/metrics")).text
    labels = f'{{engine="{mesh.workers[0].id}",model_name="{mesh.model}"'
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_params_n"):
        assert f"tokenmesh:{name}_count{labels}}} 1.0" in text
    assert f"tokenmesh:request_generation_tokens_count{labels}}} 2.0" in text
    model = f'model_name="{mesh.model}"'
    assert f'finished_reason="stop",{model}}} 2.0' in text


class FakeEncoder(Actor):
    """Gives every image the same embeddings."""

    @handles(Encode)
    async def encode_media(self, message: Encode, context: Context) -> Encoded:
        items = [
            msgspec.structs.replace(each, embeddings=BlobKey("embedded")) for each in message.items
        ]
        return Encoded(items=items, cached=1)


async def test_images_are_encoded_before_a_worker_sees_them(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    await mesh.listen(FakeEncoder(), subjects.encode(mesh.model))
    mesh.tokenizer.media = [
        MediaItem(kind="image", content_hash="aa", offset=1, length=2, pixels=BlobKey("pixels"))
    ]
    response = await client.post("/v1/chat/completions", json=ask(mesh))
    assert response.status_code == 200, response.text
    assert [each.embeddings for each in mesh.workers[0].generates[0].media] == ["embedded"]


async def test_no_encoder_is_a_503(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    item = MediaItem(kind="image", content_hash="a", offset=0, length=1, pixels=BlobKey("p"))
    mesh.tokenizer.media = [item]
    response = await client.post("/v1/chat/completions", json=ask(mesh))
    assert response.status_code == 503


async def test_an_internal_error_has_the_same_error_shape(
    mesh: BackEnd, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_name: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(mesh.gateway.core.mesh.catalog, "find", broken)
    # A route of our own, and one of FastAPI's.
    for path in ("/v1/chat/completions", "/tokenize"):
        response = await client.post(path, json=ask(mesh))
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
        assert "Zero" not in response.text
        # the server disconnects
        assert response.headers["connection"] == "close"
    monkeypatch.undo()
    assert (await client.post("/v1/chat/completions", json=ask(mesh))).status_code == 200


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("data:image/png," + "x" * 40_000, 400),
        ("data:image/png;base64," + "!" * 40_000, 400),
        ("data:image/png;base64," + "A" * 400_000, 413),
    ],
)
async def test_broken_and_large_data_uris_are_refused(
    bus_settings: BusSettings, redis_settings: RedisSettings, url: str, status: int
) -> None:
    async with (
        BackEnd(bus_settings, redis_settings, max_media_bytes=100_000) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as client,
    ):
        part = {"type": "image_url", "image_url": {"url": url}}
        body = ask(mesh, messages=[{"role": "user", "content": [part]}])
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == status, response.text
        assert "messages[0].content[0]" in response.json()["error"]["message"]


async def test_a_body_that_does_not_arrive_times_out(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with BackEnd(bus_settings, redis_settings, body_timeout_s=0.2) as mesh:
        host, port = mesh.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")
        status = await reader.readline()
        writer.close()
        assert status.startswith(b"HTTP/1.1 504 ")
