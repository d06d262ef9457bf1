"""Tokens that stand for media, in the usage of every API, the tenant's and the metrics."""

import secrets
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from tests.fakes.back_end import BackEnd, saying
from tests.fakes.key_file import key_entry
from tokenmesh.shared.actor import Actor, Context, handles
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages import Encode, Encoded
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.subjects import encode

MEDIA = [
    MediaItem(kind="image", content_hash="a", offset=0, length=4, holes=((1, 2),)),
    MediaItem(kind="image", content_hash="b", offset=4, length=2),
    MediaItem(kind="video", content_hash="c", offset=6, length=3),
    MediaItem(kind="audio", content_hash="d", offset=9, length=2),
]
COUNTS = {"image_tokens": 5, "audio_tokens": 2, "video_tokens": 3}
BY_MODALITY = {"image": 5, "audio": 2, "video": 3}
CHAT = [{"role": "user", "content": "one, two, three, four, five, six, seven"}]


class FakeEncoder(Actor):
    @handles(Encode)
    async def encode(self, message: Encode, context: Context) -> Encoded:
        key = BlobKey("emb:x")
        items = [msgspec.structs.replace(item, embeddings=key) for item in message.items]
        return Encoded(items=items, cached=0)


async def test_tokens_of_media_are_counted_by_modality_for_every_api(
    bus_settings: BusSettings, redis_settings: RedisSettings, tmp_path: Path
) -> None:
    tenant, keys = f"t-{secrets.token_hex(4)}", tmp_path / "keys.toml"
    keys.write_text(f"[tenants.{tenant}]\n{key_entry(f'sk-{tenant}', tenant)}")
    async with BackEnd(
        bus_settings, redis_settings, script=saying("Hello"), keys_file=keys
    ) as mesh:
        await mesh.listen(FakeEncoder(), encode(mesh.model))
        mesh.tokenizer.media = MEDIA
        headers = {"authorization": f"Bearer sk-{tenant}"}
        async with httpx.AsyncClient(base_url=mesh.url, headers=headers, timeout=10) as client:
            await _check_each_api(client, mesh)
            (model,) = (await client.get("/v1/usage")).json()["models"]
            assert {name: model[name] for name in COUNTS} == {
                name: 4 * count for name, count in COUNTS.items()
            }
        for kind, count in BY_MODALITY.items():
            labels = {"model_name": mesh.model, "modality": kind}
            assert mesh.metrics.counter("media_tokens", **labels)._value.get() == 4 * count
            tokens = mesh.metrics.counter("tenant_tokens", tenant=tenant, kind=kind)
            assert tokens._value.get() == 4 * count


async def _check_each_api(client: httpx.AsyncClient, mesh: BackEnd) -> None:
    async def post(path: str, **body: Any) -> Any:
        return (await client.post(path, json={"model": mesh.model, **body})).json()["usage"]

    details = (await post("/v1/chat/completions", messages=CHAT))["prompt_tokens_details"]
    assert {name: details[name] for name in COUNTS} == COUNTS
    assert details["multimodal_tokens"] == BY_MODALITY
    typed = openai.types.completion_usage.PromptTokensDetails.model_validate(details)
    assert (typed.image_tokens, typed.audio_tokens) == (5, 2)
    for store in (True, False):
        usage = await post("/v1/responses", input="Hi", store=store)
        given = usage["input_tokens_details"]
        assert {name: given[name] for name in COUNTS} == COUNTS
    usage = await post("/v1/messages", messages=CHAT, max_tokens=8)
    assert usage["input_tokens_details"] == COUNTS


@pytest.mark.parametrize("media", [[], MEDIA[1:2]])
async def test_a_modality_without_tokens_is_absent(
    bus_settings: BusSettings, redis_settings: RedisSettings, media: list[MediaItem]
) -> None:
    async with BackEnd(bus_settings, redis_settings, script=saying("Hello")) as mesh:
        await mesh.listen(FakeEncoder(), encode(mesh.model))
        mesh.tokenizer.media = media
        body: dict[str, Any] = {"model": mesh.model, "messages": CHAT}
        async with httpx.AsyncClient(base_url=mesh.url, timeout=10) as client:
            answer = (await client.post("/v1/chat/completions", json=body)).json()
        details = answer["usage"]["prompt_tokens_details"]
        found = {name: details[name] for name in COUNTS if name in details}
        assert found == ({"image_tokens": 2} if media else {})
        assert details.get("multimodal_tokens") == ({"image": 2} if media else None)
