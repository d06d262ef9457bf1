"""Images in chats: from every source to pixels in Redis and placeholders in the prompt.

One tokenizer serves all tests.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy
import pytest
import pytest_asyncio
from PIL import Image
from transformers import CLIPImageProcessorPil

from tests.fakes.image_server import ImageServer, image_server
from tests.fakes.images import data_uri, image_file, picture
from tests.fakes.llava import IMAGE_SIZE, NUM_PATCHES, llava_without_weights
from tests.fakes.service_mesh import running
from tests.fakes.tokenizers import write_json
from tests.servers import Server, bus_settings_of, redis_settings_of
from tokenmesh.services.tokenizer_svc.main import build
from tokenmesh.shared import subjects, tensor_blob
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.bus.message_bus import MessageBus, connect
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.model import MediaSettings, ModelSettings, TokenizerSettings
from tokenmesh.shared.errors import CheckpointError, InvalidInput, NotFound, PayloadTooLarge
from tokenmesh.shared.ids import BlobKey, ModelName, RequestId
from tokenmesh.shared.messages.tokenize import (
    ChatPrompt,
    IdsPrompt,
    TextPrompt,
    Tokenize,
    Tokenized,
)
from tokenmesh.shared.redis import open_redis
from tokenmesh.shared.tokens import pack_ids, unpack_ids

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = ModelName("llava")
OTHER_MODEL = ModelName("llava-2")
IMAGE_TOKEN = 3


@dataclass
class Client:
    """Sends requests to the running tokenizer of a model."""

    bus: MessageBus
    model: ModelName = MODEL

    async def tokenize(self, prompt: object, **fields: object) -> Tokenized:
        message = Tokenize(request_id=RequestId("r"), model=self.model, prompt=prompt, **fields)  # type: ignore[arg-type]
        subject = subjects.tokenize(self.model)
        answer = await self.bus.request(subject, message, deadline_s=now_s() + 10)
        assert isinstance(answer, Tokenized)
        return answer

    async def chat(self, *parts: object, **fields: object) -> Tokenized:
        messages = [{"role": "user", "content": list(parts)}]
        return await self.tokenize(
            ChatPrompt(messages_json=msgspec.json.encode(messages)), **fields
        )


def image(url: str, **fields: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}, **fields}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava_without_weights(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def settings(checkpoint: Path, nats_server: Server, redis_server: Server) -> Settings:
    media = MediaSettings(
        allow_private_addresses=True,
        max_bytes=50_000,
        max_images=4,
        max_pixels=100_000,
        fetch_timeout_s=2.0,
        decode_processes=1,
    )
    return Settings(
        models=(ModelSettings(model=str(checkpoint), served_model_name=(MODEL,)),),
        tokenizer=TokenizerSettings(media=media, route_block_tokens=16),
        bus=bus_settings_of(nats_server),
        redis=redis_settings_of(redis_server),
    )


def with_other_model(
    settings: Settings,
    directory: Path,
    of_model: Mapping[str, object] = MappingProxyType({}),
    **more: object,
) -> Settings:
    """Settings of a tokenizer besides the one that all tests share; of_model: of its model."""
    values = {"model": str(directory), "served_model_name": (OTHER_MODEL,), **of_model}
    model = ModelSettings.model_validate(values)
    return settings.model_copy(update={"models": (model,), **more})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bus(settings: Settings) -> AsyncIterator[MessageBus]:
    connection = await connect(settings.bus, "test")
    yield connection
    await connection.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def blobs(settings: Settings) -> AsyncIterator[Blobs]:
    redis = open_redis(settings.redis)
    yield Blobs(redis, settings.redis)
    await redis.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(settings: Settings, bus: MessageBus) -> AsyncIterator[Client]:
    async with running("tokenizer", settings, build):
        yield Client(bus)


@pytest_asyncio.fixture(loop_scope="module")
async def server() -> AsyncIterator[ImageServer]:
    async with image_server() as server:
        yield server


def file(seed: int) -> bytes:
    return image_file(picture(seed))


async def test_an_image_becomes_features_and_placeholders(client: Client, blobs: Blobs) -> None:
    answer = await client.chat("look ", image(data_uri(file(1))), " here")
    (item,) = answer.media
    ids = unpack_ids(answer.token_ids)
    assert item.length == NUM_PATCHES
    assert [place for place, token in enumerate(ids) if token == IMAGE_TOKEN] == list(
        range(item.offset, item.offset + item.length)
    )
    pixels = tensor_blob.decode_named(await blobs.get(item.features))["pixel_values"]
    oracle = CLIPImageProcessorPil(
        size={"shortest_edge": IMAGE_SIZE},
        crop_size=IMAGE_SIZE,
        image_mean=[0.48, 0.46, 0.41],
        image_std=[0.27, 0.26, 0.28],
    )
    expected = oracle(images=[picture(1)], return_tensors="np")["pixel_values"][0]
    assert (pixels.dtype, pixels.shape) == ("float32", (1, 3, IMAGE_SIZE, IMAGE_SIZE))
    ours = numpy.frombuffer(pixels.data, dtype="<f4").reshape(expected.shape)
    numpy.testing.assert_array_equal(ours, expected)


async def test_the_hash_covers_file_and_preprocessing(
    client: Client, settings: Settings, checkpoint: Path, bus: MessageBus, tmp_path: Path
) -> None:
    first = (await client.chat(image(data_uri(file(2))))).media[0].content_hash
    assert len(first) == len(hashlib.sha256().hexdigest())
    assert (await client.chat(image(data_uri(file(2))))).media[0].content_hash == first
    assert (await client.chat(image(data_uri(file(3))))).media[0].content_hash != first
    other = llava_without_weights(tmp_path)
    processor = msgspec.json.decode((other / "preprocessor_config.json").read_bytes())
    write_json(other / "preprocessor_config.json", {**processor, "image_mean": [0.1, 0.1, 0.1]})
    async with running("tokenizer", with_other_model(settings, other), build):
        answer = await Client(bus, OTHER_MODEL).chat(image(data_uri(file(2))))
        assert answer.media[0].content_hash != first


async def test_every_source_and_spelling_of_an_image_is_taken(
    client: Client, blobs: Blobs, server: ImageServer
) -> None:
    data = file(4)
    key = await blobs.put(data)
    await blobs.put(data, key=BlobKey("tm:file:file-abc"))
    url = server.serve("/a.png", data)
    uri = data_uri(data)
    parts: list[object] = [
        image(uri),
        image(url),
        image(f"blob:{key}"),
        image("file-abc"),
        {"type": "image_url", "image_url": uri},
        {"type": "input_image", "image_url": uri},
        {"type": "input_image", "file_id": "file-abc"},
        {"image_url": {"url": uri}},
    ]
    hashes = {(await client.chat(part)).media[0].content_hash for part in parts}
    assert len(hashes) == 1


async def test_a_source_that_is_named_twice_is_fetched_once(
    client: Client, server: ImageServer
) -> None:
    url = server.serve("/twice.png", file(5))
    answer = await client.chat(image(url), "and", image(url), image(data_uri(file(6))))
    assert server.hits == ["/twice.png"]
    first, second, third = answer.media
    assert first.features == second.features != third.features
    assert first.offset < second.offset < third.offset


async def test_images_of_several_messages_keep_their_order(client: Client) -> None:
    uris = [data_uri(file(seed)) for seed in (7, 8)]
    messages = [
        {"role": "user", "content": [image(uris[0]), "first"]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": ["second", image(uris[1])]},
    ]
    prompt = ChatPrompt(messages_json=msgspec.json.encode(messages))
    both = (await client.tokenize(prompt)).media
    alone = [(await client.chat(image(uri))).media[0].content_hash for uri in uris]
    assert [item.content_hash for item in both] == alone


async def test_a_uuid_stands_for_an_image_that_was_sent_before(client: Client) -> None:
    first = await client.chat(image(data_uri(file(9)), uuid="my-image"))
    again = await client.chat({"type": "image_url", "image_url": None, "uuid": "my-image"})
    assert again.media == first.media
    with pytest.raises(NotFound, match="send the image"):
        await client.chat({"type": "image_url", "uuid": "my-image"}, cache_salt="other")
    with pytest.raises(NotFound, match=r"messages\[0\].content\[0\]: no image is stored"):
        await client.chat({"type": "image_url", "uuid": "never"})


async def test_media_change_the_route_hashes_from_their_place_on(client: Client) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 3
    one, other = [await client.chat(text, image(data_uri(file(seed)))) for seed in (10, 11)]
    assert one.token_ids == other.token_ids
    blocks_before = one.media[0].offset // 16
    assert 0 < blocks_before < len(one.route_hashes) // 8
    assert one.route_hashes[: 8 * blocks_before] == other.route_hashes[: 8 * blocks_before]
    assert one.route_hashes[8 * blocks_before :] != other.route_hashes[8 * blocks_before :]


async def test_truncation_moves_images_or_refuses_to_cut_them(client: Client) -> None:
    whole = await client.chat("a b c d e f", image(data_uri(file(12))), "g")
    num_tokens = len(unpack_ids(whole.token_ids))
    offset = whole.media[0].offset
    cut = await client.chat(
        "a b c d e f", image(data_uri(file(12))), "g", truncate_prompt_tokens=num_tokens - 2
    )
    assert cut.media[0].offset == offset - 2
    with pytest.raises(InvalidInput, match="cut off a part of a media item"):
        await client.chat(
            "a b c d e f",
            image(data_uri(file(12))),
            "g",
            truncate_prompt_tokens=num_tokens - offset - 5,
        )


async def test_placeholders_that_the_client_wrote_need_images(client: Client) -> None:
    with pytest.raises(InvalidInput, match="1 placeholders of media"):
        await client.tokenize(TextPrompt(text="an <image> of"))
    with pytest.raises(InvalidInput, match="2 image placeholders for 1 images"):
        await client.chat("an <image> of", image(data_uri(file(13))))
    with pytest.raises(InvalidInput, match="1 placeholders of media"):
        await client.tokenize(IdsPrompt(token_ids=pack_ids([IMAGE_TOKEN])))


BAD_IMAGES: list[tuple[str, type[InvalidInput], str]] = [
    ("data:image/png;base64,????", InvalidInput, "not base64"),
    ("data:image/png,abc", InvalidInput, "not of the form data"),
    (data_uri(b"text"), InvalidInput, "not an image of a known format"),
    (data_uri(image_file(picture(14))[:200]), InvalidInput, "damaged"),
    (data_uri(b"x" * 50_001), PayloadTooLarge, "more than 50000 bytes|at most 50000"),
    (data_uri(image_file(Image.new("RGB", (400, 400)))), PayloadTooLarge, "400x400 pixels"),
    ("file-nothing", NotFound, "upload 'file-nothing' does not exist"),
    ("blob:nothing", NotFound, "does not exist or has expired"),
    ("http://nowhere.invalid/a.png", InvalidInput, "does not resolve"),
    ("file:///etc/passwd", InvalidInput, "neither http, https nor data"),
]


async def test_a_bad_image_is_named_and_the_next_one_is_served(client: Client) -> None:
    for url, error, message in BAD_IMAGES:
        with pytest.raises(error, match=message) as refused:
            await client.chat("see", image(url))
        assert refused.value.message.startswith("messages[0].content[1]: ")
    assert len((await client.chat(image(data_uri(file(1))))).media) == 1


async def test_too_many_images_are_refused(client: Client) -> None:
    with pytest.raises(InvalidInput, match="5 images, at most 4"):
        await client.chat(*[image(data_uri(file(16)))] * 5)


async def test_one_bad_image_ends_the_fetching_of_the_others(
    client: Client, server: ImageServer
) -> None:
    async with asyncio.timeout(15):
        with pytest.raises(InvalidInput, match=r"content\[1\]: the URL returns status 404"):
            await client.chat(image(server.url("/slow")), image(server.url("/none")))


async def test_private_hosts_are_refused_by_default(
    settings: Settings, checkpoint: Path, bus: MessageBus, server: ImageServer
) -> None:
    limits = settings.tokenizer.model_copy(update={"media": MediaSettings(decode_processes=1)})
    url = server.serve("/a.png", file(1))
    own = with_other_model(settings, checkpoint, tokenizer=limits)
    async with running("tokenizer", own, build):
        with pytest.raises(InvalidInput, match="not on the public internet"):
            await Client(bus, OTHER_MODEL).chat(image(url))
    assert server.hits == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"image_token_index": 600}, "lacks the token 600; --language-model-only serves"),
    ],
)
async def test_a_checkpoint_whose_parts_disagree_is_refused_at_the_start(
    overrides: dict[str, object], message: str, settings: Settings, tmp_path: Path
) -> None:
    own = with_other_model(settings, llava_without_weights(tmp_path, **overrides))
    with pytest.raises(CheckpointError, match=message):
        async with running("tokenizer", own, build):
            pass


async def test_limits_of_a_model_are_in_place_of_those_of_all(
    settings: Settings, bus: MessageBus, checkpoint: Path
) -> None:
    own = with_other_model(settings, checkpoint, {"limit_mm_per_prompt": {"image": 1}})
    async with running("tokenizer", own, build):
        client = Client(bus, OTHER_MODEL)
        assert len((await client.chat(image(data_uri(file(1))))).media) == 1
        with pytest.raises(InvalidInput, match="2 images, at most 1"):
            await client.chat(*[image(data_uri(file(16)))] * 2)


async def test_options_of_a_request_are_part_of_an_images_identity(client: Client) -> None:
    content = [{"role": "user", "content": [image(data_uri(file(2)))]}]
    hashes = set()
    for options in (None, b'{"size":{"shortest_edge":40}}', b'{"size":{"shortest_edge":41}}'):
        prompt = ChatPrompt(
            messages_json=msgspec.json.encode(content), mm_processor_kwargs_json=options
        )
        hashes.add((await client.tokenize(prompt)).media[0].content_hash)
    assert len(hashes) == 3
    with pytest.raises(InvalidInput, match="no option 'patch'"):
        await client.tokenize(
            ChatPrompt(
                messages_json=msgspec.json.encode(content), mm_processor_kwargs_json=b'{"patch":1}'
            )
        )


async def test_the_language_model_alone_serves_text(
    settings: Settings, bus: MessageBus, checkpoint: Path
) -> None:
    own = with_other_model(settings, checkpoint, {"language_model_only": True})
    async with running("tokenizer", own, build):
        client = Client(bus, OTHER_MODEL)
        assert (await client.chat("hi")).token_ids
        with pytest.raises(InvalidInput, match="accepts text only"):
            await client.chat(image(data_uri(file(1))))
