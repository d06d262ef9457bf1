"""mm_encoder_svc on the real bus: from a chat's images to the embeddings of transformers."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy
import pytest
import torch
from transformers import LlavaForConditionalGeneration

from tests.fakes.images import data_uri, image_file, picture
from tests.fakes.llava import IMAGE_SIZE, NUM_PATCHES, llava
from tests.fakes.service_mesh import running
from tests.fakes.tokenizers import byte_level_bpe
from tokenmesh.services.mm_encoder_svc.main import build
from tokenmesh.services.tokenizer_svc.main import build as build_tokenizer
from tokenmesh.shared import subjects, tensor_blob
from tokenmesh.shared.blobs import PREFIX, Blobs, check_of
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.config.model import EncoderSettings, ModelSettings
from tokenmesh.shared.errors import (
    NoResponders,
    NotFound,
    PayloadTooLarge,
    ProtocolError,
    UnknownModel,
)
from tokenmesh.shared.ids import BlobKey, ModelName, RequestId
from tokenmesh.shared.messages import Encode, Encoded
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.messages.tokenize import ChatPrompt, Tokenize, Tokenized
from tokenmesh.shared.redis import open_redis
from tokenmesh.shared.tensor_blob import TensorBlob, encode_named

MODEL = ModelName("llava")
ALIAS = ModelName("llava-too")
REQUEST = RequestId("r")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture
def settings(
    checkpoint: Path, bus_settings: BusSettings, redis_settings: RedisSettings
) -> Settings:
    model = ModelSettings(model=str(checkpoint), served_model_name=(MODEL, ALIAS), dtype="float32")
    limits = EncoderSettings(device="cpu", max_items=8)
    return Settings(models=(model,), encoder=limits, bus=bus_settings, redis=redis_settings)


@dataclass
class Client:
    """Puts pixels where a tokenizer would, and asks the running encoder."""

    bus: MessageBus
    blobs: Blobs

    async def item(self, image: numpy.ndarray, **fields: object) -> MediaItem:
        """Random content hashes keep the tests apart: they share one Redis."""
        blob = TensorBlob("float32", (1, *image.shape), image.astype("<f4").tobytes())
        values: dict[str, object] = {
            "kind": "image",
            "content_hash": secrets.token_hex(32),
            "offset": 3,
            "length": NUM_PATCHES,
            "features": await self.blobs.put(encode_named({"pixel_values": blob})),
        }
        return MediaItem(**{**values, **fields})  # type: ignore[arg-type]

    async def encode(self, *items: MediaItem, model: ModelName = MODEL) -> Encoded:
        message = Encode(request_id=REQUEST, model=model, items=list(items))
        answer = await self.bus.request(subjects.encode(model), message, deadline_s=now_s() + 10)
        assert isinstance(answer, Encoded)
        return answer

    async def embeddings(self, item: MediaItem) -> numpy.ndarray:
        assert item.embeddings is not None
        blob = tensor_blob.decode(await self.blobs.get(item.embeddings))
        assert blob.dtype == "float32"
        return numpy.frombuffer(blob.data, dtype="<f4").reshape(blob.shape)


@pytest.fixture
async def client(settings: Settings, bus: MessageBus, blobs: Blobs) -> AsyncIterator[Client]:
    async with running("encoder", settings, build):
        yield Client(bus, blobs)


def noise(seed: int) -> numpy.ndarray:
    return numpy.random.default_rng(seed).standard_normal(
        (3, IMAGE_SIZE, IMAGE_SIZE), dtype=numpy.float32
    )


async def delete(redis_settings: RedisSettings, key: BlobKey | None) -> None:
    """As if Redis had lost it."""
    redis = open_redis(redis_settings)
    assert await redis.call("DEL", f"{PREFIX}{key}") == 1
    await redis.close()


async def test_a_chats_images_become_the_embeddings_of_transformers(
    client: Client, settings: Settings, checkpoint: Path
) -> None:
    pictures = [picture(seed, 50, 40) for seed in (1, 2, 3)]
    uris = [data_uri(image_file(one)) for one in pictures]
    parts = ["see", *({"type": "image_url", "image_url": {"url": uri}} for uri in uris)]
    messages = msgspec.json.encode([{"role": "user", "content": parts}])
    async with running("tokenizer", settings, build_tokenizer):
        message = Tokenize(
            request_id=REQUEST, model=MODEL, prompt=ChatPrompt(messages_json=messages)
        )
        tokenized = await client.bus.request(
            subjects.tokenize(MODEL), message, deadline_s=now_s() + 10
        )
    assert isinstance(tokenized, Tokenized)
    encoded = await client.encode(*tokenized.media)
    bare = {"embeddings": None, "embeddings_check": ""}
    assert [msgspec.structs.replace(item, **bare) for item in encoded.items] == tokenized.media
    oracle = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    blobs = [await client.blobs.get(item.features) for item in encoded.items]
    pixels = [tensor_blob.decode_named(blob)["pixel_values"] for blob in blobs]
    stacked = torch.stack(
        [torch.frombuffer(bytearray(one.data), dtype=torch.float32) for one in pixels]
    ).view(3, *pixels[0].shape[1:])
    with torch.inference_mode():
        expected = oracle.get_image_features(
            pixel_values=stacked,
            vision_feature_layer=-2,
            vision_feature_select_strategy="default",
        ).pooler_output
    for item, theirs in zip(encoded.items, expected, strict=True):
        ours = await client.embeddings(item)
        assert ours.shape == (item.length, 32)
        numpy.testing.assert_allclose(ours, theirs.numpy(), atol=2e-4, rtol=0)


async def test_an_image_is_encoded_once_for_requests_one_after_another(client: Client) -> None:
    item = await client.item(noise(4))
    first = await client.encode(item)
    moved = msgspec.structs.replace(item, offset=9)
    again = await client.encode(moved, model=ALIAS)
    assert (first.cached, again.cached) == (0, 1)
    assert again.items[0].embeddings == first.items[0].embeddings
    assert again.items[0].offset == 9


async def test_queries_and_hits_of_the_cache_are_counted(
    settings: Settings, bus: MessageBus, blobs: Blobs
) -> None:
    async with running("encoder", settings, build) as mesh:
        client = Client(bus, blobs)
        item = await client.item(noise(16))
        for _ in range(3):
            await client.encode(item)
        counts = mesh.metrics.render().decode()
    for name, value in (("queries", 3), ("hits", 2)):
        labels = f'engine="{mesh.instance_id}",model_name="{MODEL}"'
        assert f"tokenmesh:mm_cache_{name}_total{{{labels}}} {value}.0" in counts


async def test_an_image_is_encoded_once_for_concurrent_requests(client: Client) -> None:
    item = await client.item(noise(5))
    answers = await asyncio.gather(*(client.encode(item, item) for _ in range(5)))
    assert sum(answer.cached for answer in answers) == 9
    assert len({one.embeddings for answer in answers for one in answer.items}) == 1


async def test_different_images_of_one_batch_keep_their_own_embeddings(client: Client) -> None:
    items = [await client.item(noise(seed)) for seed in range(6, 12)]
    together = await client.encode(*items)
    assert together.cached == 0
    for item, encoded in zip(items, together.items, strict=True):
        fresh = msgspec.structs.replace(item, content_hash=secrets.token_hex(32))
        alone = await client.encode(fresh)
        numpy.testing.assert_allclose(
            await client.embeddings(alone.items[0]),
            await client.embeddings(encoded),
            atol=1e-5,
            rtol=0,
        )


async def test_a_second_process_reuses_what_the_first_one_encoded(
    client: Client, settings: Settings, redis_settings: RedisSettings
) -> None:
    item = await client.item(noise(12))
    first = await client.encode(item)
    await delete(redis_settings, item.features)
    async with running("encoder", settings, build):
        answers = [await client.encode(item) for _ in range(6)]
    assert all(answer.cached == 1 for answer in answers)
    (ours,), (theirs,) = answers[0].items, first.items
    assert ours.embeddings == theirs.embeddings
    # by chance none was answered by the process that knows
    assert ours.embeddings_check in ("", theirs.embeddings_check)


async def test_embeddings_that_redis_lost_come_back_from_memory(
    client: Client, redis_settings: RedisSettings
) -> None:
    item = await client.item(noise(13))
    first = await client.encode(item)
    before = await client.embeddings(first.items[0])
    await delete(redis_settings, first.items[0].embeddings)
    await delete(redis_settings, item.features)
    again = await client.encode(item)
    assert again.cached == 1
    numpy.testing.assert_array_equal(await client.embeddings(again.items[0]), before)


async def test_replaced_embeddings_do_not_match_their_checksum(
    client: Client, redis_settings: RedisSettings
) -> None:
    (first,) = (await client.encode(await client.item(noise(9)))).items
    assert first.embeddings is not None
    good = await client.blobs.get(first.embeddings)
    assert first.embeddings_check == check_of(good)
    await client.blobs.put(b"poison", first.embeddings)
    (second,) = (await client.encode(first)).items
    assert second.embeddings_check == check_of(good)
    # a worker that has found it out
    await delete(redis_settings, second.embeddings)
    (third,) = (await client.encode(second)).items
    assert await client.blobs.get(first.embeddings) == good
    assert third == second


async def test_pixels_that_expired_ask_for_the_prompt_again(
    client: Client, redis_settings: RedisSettings
) -> None:
    item = await client.item(noise(14))
    await delete(redis_settings, item.features)
    with pytest.raises(NotFound, match="tokenize the prompt again") as missing:
        await client.encode(item)
    assert missing.value.param == "media"
    restored = await client.item(noise(14), content_hash=item.content_hash)
    assert (await client.encode(restored)).cached == 0


async def test_other_images_are_served_after_a_bad_one(client: Client) -> None:
    wrong_shape = await client.item(noise(15)[:, :5])
    with pytest.raises(ProtocolError, match="the tower cannot encode this image"):
        await client.encode(wrong_shape)
    with pytest.raises(ProtocolError, match="makes 25 embeddings, the prompts have places for 3"):
        await client.encode(await client.item(noise(15), length=3))
    with pytest.raises(ProtocolError, match="no tower for video"):
        await client.encode(await client.item(noise(15), kind="video"))
    garbage = await client.blobs.put(b"garbage")
    with pytest.raises(ProtocolError, match="not a blob of named tensors"):
        await client.encode(await client.item(noise(15), features=garbage))
    odd = await client.blobs.put(encode_named({"input_ids": TensorBlob("bool", (1,), b"1")}))
    with pytest.raises(ProtocolError, match="tower does not take input_ids"):
        await client.encode(await client.item(noise(15), features=odd))
    with pytest.raises(PayloadTooLarge, match="9 media items, at most 8"):
        await client.encode(*[await client.item(noise(15))] * 9)
    message = Encode(request_id=REQUEST, model=ModelName("other"), items=[])
    with pytest.raises(UnknownModel):
        await client.bus.request(subjects.encode(MODEL), message, deadline_s=now_s() + 5)
    assert (await client.encode(await client.item(noise(15)))).cached == 0


async def test_a_mesh_of_text_models_leaves_the_encoder_idle(
    settings: Settings, bus: MessageBus, tmp_path: Path
) -> None:
    text = byte_level_bpe(tmp_path)
    own = settings.model_copy(update={"models": (ModelSettings(model=str(text)),)})
    async with running("encoder", own, build) as mesh:
        assert mesh.ready.is_set()
        message = Encode(request_id=REQUEST, model=ModelName(str(text)), items=[])
        with pytest.raises(NoResponders):
            await bus.request(
                subjects.encode(ModelName(str(text))), message, deadline_s=now_s() + 5
            )
        counts = mesh.metrics.render().decode()
    for name in ("queries", "hits"):
        labels = f'engine="{mesh.instance_id}",model_name="{text}"'
        assert f"tokenmesh:mm_cache_{name}_total{{{labels}}} 0.0" in counts
