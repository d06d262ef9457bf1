"""Videos in chats: from every source to patches in Redis and placeholders in the prompt.

One tokenizer serves all tests.
"""

import asyncio
import base64
from collections.abc import AsyncIterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from tests.fakes.image_server import ImageServer, image_server
from tests.fakes.images import data_uri, image_file, picture
from tests.fakes.media_models import MEDIA as FAKES
from tests.fakes.media_models import token_ids, without_weights
from tests.fakes.service_mesh import running
from tests.fakes.videos import pictures, video_file
from tests.servers import Server, bus_settings_of, redis_settings_of
from tokenmesh.services.tokenizer_svc.main import build
from tokenmesh.services.tokenizer_svc.media.loader import MediaLoader
from tokenmesh.shared import subjects, tensor_blob
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.bus.message_bus import MessageBus, connect
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.model import MediaSettings, ModelSettings, TokenizerSettings
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge
from tokenmesh.shared.ids import ModelName, RequestId
from tokenmesh.shared.messages.tokenize import ChatPrompt, Tokenize, Tokenized
from tokenmesh.shared.redis import open_redis
from tokenmesh.shared.tokens import unpack_ids

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = ModelName("watcher")
VIDEO_TOKEN = token_ids(FAKES["qwen3_vl"])["video_token"]


@dataclass
class Client:
    bus: MessageBus

    async def chat(self, *parts: object, **kwargs: object) -> Tokenized:
        messages = [{"role": "user", "content": list(parts)}]
        prompt = ChatPrompt(
            messages_json=msgspec.json.encode(messages),
            mm_processor_kwargs_json=msgspec.json.encode(kwargs) if kwargs else None,
        )
        message = Tokenize(request_id=RequestId("r"), model=MODEL, prompt=prompt)
        subject = subjects.tokenize(MODEL)
        answer = await self.bus.request(subject, message, deadline_s=now_s() + 18)
        assert isinstance(answer, Tokenized)
        return answer


def video(url: str, **fields: object) -> dict[str, object]:
    return {"type": "video_url", "video_url": {"url": url}, **fields}


def uri_of(data: bytes) -> str:
    return "data:video/mp4;base64," + base64.b64encode(data).decode()


def file(seed: int, count: int = 8) -> bytes:
    return video_file(pictures(count, seed=seed))


@pytest.fixture(scope="module")
def settings(
    tmp_path_factory: pytest.TempPathFactory, nats_server: Server, redis_server: Server
) -> Settings:
    media = MediaSettings(
        allow_private_addresses=True,
        decode_processes=1,
        max_videos=2,
        max_video_bytes=60_000,
        max_video_frames=20,
        max_video_s=30.0,
        max_pixels=50_000,
        fetch_timeout_s=15.0,
    )
    directory = without_weights(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl")
    return Settings(
        models=(ModelSettings(model=str(directory), served_model_name=(MODEL,)),),
        tokenizer=TokenizerSettings(media=media),
        bus=bus_settings_of(nats_server),
        redis=redis_settings_of(redis_server),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(settings: Settings) -> AsyncIterator[Client]:
    async with running("tokenizer", settings, build) as mesh:
        bus = await connect(settings.bus, "test")
        yield Client(bus)
        await bus.close()
        del mesh


@pytest_asyncio.fixture(loop_scope="module")
async def server() -> AsyncIterator[ImageServer]:
    async with image_server() as server:
        yield server


async def test_a_video_becomes_patches_and_placeholders_with_times(
    client: Client, settings: Settings
) -> None:
    answer = await client.chat("look ", video(uri_of(file(1))), " here", fps=4)
    (item,) = answer.media
    ids = unpack_ids(answer.token_ids)
    # 8 frames at 8 a second: 4 of them, 2 in each patch, with the time before each pair
    assert (item.kind, item.grid[0], len(item.runs())) == ("video", 2, 2)
    taken = {place for first, end in item.runs() for place in range(first, end)}
    assert taken == {place for place, token in enumerate(ids) if token == VIDEO_TOKEN}
    redis = open_redis(settings.redis)
    blob = await Blobs(redis, settings.redis).get(item.features)
    await redis.close()
    named = tensor_blob.decode_named(blob)
    assert sorted(named) == ["pixel_values_videos", "video_grid_thw"]
    patches = named["pixel_values_videos"]
    assert patches.shape == (item.grid[0] * item.grid[1] * item.grid[2], 3 * 2 * 4 * 4)
    assert item.num_embeddings == patches.shape[0] // 4


async def test_every_source_and_option_of_a_video(client: Client, server: ImageServer) -> None:
    data = file(2)
    url = server.serve("/a.mp4", data)
    parts = [video(uri_of(data)), video(url), {"type": "video", "video": url}]
    hashes = {(await client.chat(part)).media[0].content_hash for part in parts}
    assert len(hashes) == 1
    other = await client.chat(video(url), num_frames=6)
    assert other.media[0].content_hash not in hashes
    assert other.media[0].grid[0] == 3
    named = await client.chat(video(url, uuid="clip"))
    again = await client.chat({"type": "video_url", "video_url": None, "uuid": "clip"})
    assert again.media == named.media


async def test_images_and_videos_keep_their_places(client: Client) -> None:
    image = {"type": "image_url", "image_url": {"url": data_uri(image_file(picture(1)))}}
    answer = await client.chat(video(uri_of(file(3))), "and", image, video(uri_of(file(4))), fps=2)
    assert [item.kind for item in answer.media] == ["video", "image", "video"]
    assert [item.offset for item in answer.media] == sorted(item.offset for item in answer.media)


async def test_requests_at_the_same_time_share_fetching_and_decoding(
    client: Client, server: ImageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.serve("/held.mp4", file(5))
    fetch, num_fetching = MediaLoader._fetched, 0

    async def fetched(loader: MediaLoader, *args: Any) -> bytes:
        nonlocal num_fetching
        num_fetching += 1
        if num_fetching == 20:  # the others wait for the file already
            server.release.set()
        return await fetch(loader, *args)

    monkeypatch.setattr(MediaLoader, "_fetched", fetched)
    answers = await asyncio.gather(*(client.chat(video(url)) for _ in range(20)))
    assert server.hits == ["/held.mp4"]
    assert len({answer.media[0].features for answer in answers}) == 1


async def test_bad_videos_are_named_and_the_next_one_is_served(client: Client) -> None:
    bad: list[tuple[bytes, dict[str, object], type[InvalidInput], str]] = [
        (b"text", {}, InvalidInput, "not a video of a known format"),
        (image_file(picture(1)), {}, InvalidInput, "not a video of a known format"),
        (file(1)[:400], {}, InvalidInput, "damaged|no video"),
        (bytes(60_001), {}, PayloadTooLarge, "more than 60000 bytes|at most 60000"),
        (video_file(pictures(2, 320, 240)), {}, PayloadTooLarge, "320x240 pixels, at most 50000"),
        (
            video_file(pictures(4), fps=Fraction(1, 9000)),
            {},
            PayloadTooLarge,
            "36000 s long, at most 30 s",
        ),
        (file(1, 30), {"fps": 8}, PayloadTooLarge, "30 frames of the video, at most 20"),
        (video_file(pictures(2), codec="mjpeg"), {}, InvalidInput, "codec mjpeg is not supported"),
        (file(1), {"fps": "fast"}, InvalidInput, "fps is not a number above 0"),
        (file(1), {"frames": 1}, InvalidInput, "no option 'frames'; it has fps"),
    ]
    for data, options, error, message in bad:
        with pytest.raises(error, match=message) as refused:
            await client.chat("see", video(uri_of(data)), **options)
        assert refused.value.message.startswith("messages[0].content[1]: ")
    with pytest.raises(InvalidInput, match="3 videos, at most 2"):
        await client.chat(*[video(uri_of(file(1)))] * 3)
    with pytest.raises(InvalidInput, match="has no video: video_url is missing"):
        await client.chat({"type": "video_url"})
    assert len((await client.chat(video(uri_of(file(1))))).media) == 1
