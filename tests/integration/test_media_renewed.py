"""A stream with an image migrates: it is encoded again, the embeddings may have expired."""

from typing import Any

import httpx
import msgspec
import pytest

from tests.fakes.back_end import BackEnd, ignore_generate
from tokenmesh.shared.actor import Actor, Context, handles
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.errors import NotFound
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages import Encode, Encoded
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.subjects import encode

IDS = [5] * 40
IMAGE = MediaItem(kind="image", content_hash="h", offset=0, length=1, pixels=BlobKey("p"))


class FakeEncoder(Actor):
    """Stores each answer under another key."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.max_answers = 100

    @handles(Encode)
    async def encode(self, message: Encode, context: Context) -> Encoded:
        self.num_asked += 1
        if self.num_asked > self.max_answers:
            raise NotFound("the pixels have expired")
        key = BlobKey(f"emb:{self.num_asked}")
        items = [msgspec.structs.replace(item, embeddings=key) for item in message.items]
        return Encoded(items=items, cached=0)


@pytest.mark.parametrize(("max_answers", "second_key"), [(100, "emb:2"), (1, "emb:1")])
async def test_a_migrated_stream_gets_new_embeddings(
    bus_settings: BusSettings, redis_settings: RedisSettings, max_answers: int, second_key: str
) -> None:
    async with BackEnd(bus_settings, redis_settings, script=ignore_generate(IDS)) as mesh:
        second = await mesh.add_worker()
        encoder = FakeEncoder()
        encoder.max_answers = max_answers
        await mesh.listen(encoder, encode(mesh.model))
        mesh.tokenizer.media = [IMAGE]
        mesh.workers[0].faults.dies_after = 10
        body: dict[str, Any] = {
            "model": mesh.model,
            "prompt": "Hi",
            "max_tokens": 40,
            "return_token_ids": True,
        }
        async with httpx.AsyncClient(base_url=mesh.url, timeout=15) as client:
            answer = await client.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["token_ids"] == IDS
        assert [each.embeddings for each in mesh.workers[0].generates[0].media] == ["emb:1"]
        assert [each.embeddings for each in second.generates[0].media] == [second_key]
