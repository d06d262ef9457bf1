"""Bad media of every kind and from every source, through a whole mesh that takes all of them.

Each is a 4xx that says what is wrong, in a bounded time, while other requests are answered.
"""

import asyncio
import base64
import re
import time
from collections.abc import AsyncIterator, Callable
from fractions import Fraction
from typing import Any

import numpy
import openai
import psutil
import pytest
import pytest_asyncio
from PIL import Image

from tests.fakes.bombs import (
    animation,
    flac_declaring,
    mp4_declaring,
    multi_picture,
    png_declaring,
    with_scans,
)
from tests.fakes.images import image_file, picture
from tests.fakes.media_models import media_checkpoint
from tests.fakes.omni import NAME as OMNI
from tests.fakes.omni import whole_checkpoint
from tests.fakes.recordings import RATE, audio_file, tones
from tests.fakes.speech_mesh import NAME, SpeechMesh
from tests.fakes.videos import pictures, video_file
from tests.fakes.whisper import whisper
from tests.servers import Server, bus_settings_of, redis_settings_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(240),
]
SPEECH = "speech"
"""Served alongside the other mesh, over the same NATS."""
MAX_S = 30.0
"""The bound of a refusal, on a loaded machine."""
GROWTH_BYTES = 400 * 1024 * 1024
"""The bound of all processes together; one picture of 30,000 x 30,000 pixels would take 2.7 GB."""
Make = Callable[[], bytes]


def progressive() -> bytes:
    return image_file(picture(9, 60, 60), "JPEG", progressive=True)


IMAGES: dict[str, tuple[Make, str]] = {
    "text": (lambda: b"hello" * 40, "not an image of a known format"),
    "empty": (lambda: b"", "not an image|damaged"),
    "svg": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>" * 20, "not an image"),
    "tiff": (lambda: image_file(picture(1), "TIFF"), "not an image of a known format"),
    "a recording": (lambda: audio_file(tones(0.3)), "not an image of a known format"),
    "truncated png": (lambda: image_file(picture(1))[:900], "damaged"),
    "truncated jpeg": (lambda: progressive()[:700], "damaged"),
    "truncated webp": (lambda: image_file(picture(1), "WEBP", lossless=True)[:900], "damaged"),
    "png bomb": (lambda: png_declaring(30_000, 30_000), "pixels|too large"),
    "png line": (lambda: image_file(Image.new("RGB", (100_000, 1))), "aspect ratio"),
    "png column": (lambda: image_file(Image.new("RGB", (1, 100_000))), "aspect ratio"),
    "jpeg of 100,000 scans": (lambda: with_scans(progressive(), 100_000), "more than 64 scans"),
    "mpo of 100,000 scans": (
        lambda: multi_picture(with_scans(progressive(), 100_000)),
        "more than 64 scans",
    ),
    "gif of a large canvas": (lambda: animation("GIF", 8_000, 2), "pixels"),
    "webp animation of a large canvas": (lambda: animation("WEBP", 8_000, 2), "pixels"),
}
RECORDINGS: dict[str, tuple[Make, str]] = {
    "text": (lambda: b"hello" * 40, "not audio of a known format"),
    "an image": (lambda: image_file(picture(1)), "not audio of a known format"),
    "wav without samples": (lambda: audio_file(tones(0.3))[:40], "holds no samples|damaged"),
    "flac of 10 h": (lambda: flac_declaring(10 * 3600 * RATE, 2.0), "at most 120 s"),
    "flac of 2^36 samples": (lambda: flac_declaring((1 << 36) - 1, 2.0), "at most 120 s"),
    "flac that is cut off": (lambda: audio_file(tones(3.0), "FLAC")[:4000], "damaged|cut off"),
    "silence of 10 minutes": (
        lambda: audio_file(numpy.zeros(600 * RATE, numpy.float32), "FLAC"),
        "at most 120 s",
    ),
    "silence in ogg": (
        lambda: audio_file(numpy.zeros(600 * RATE, numpy.float32), "OPUS"),
        "at most 120 s",
    ),
    "mp3 of junk": (lambda: b"\xff\xfb\x90\x64" + b"junk" * 200, "damaged"),
    "ogg of junk": (lambda: b"OggS" + b"junk" * 200, "damaged"),
    "not finite": (
        lambda: audio_file(numpy.full(RATE, numpy.inf, numpy.float32), subtype="FLOAT"),
        "not finite",
    ),
}
VIDEOS: dict[str, tuple[Make, str]] = {
    "text": (lambda: b"hello" * 40, "not a video of a known format"),
    "an image": (lambda: image_file(picture(1)), "not a video of a known format"),
    "truncated": (
        lambda: video_file(pictures(30, 96, 64), codec="mpeg4")[:3000],
        "damaged|no video|cut off",
    ),
    "absurd dimensions": (
        lambda: mp4_declaring(video_file(pictures(4)), 65_535, 65_535)[:-400],
        "damaged|pixels",
    ),
    "large frames": (lambda: video_file(pictures(1, 16_000, 4_000)), "pixels, at most"),
    "10 h": (lambda: video_file(pictures(4), fps=Fraction(1, 9000)), "s long, at most"),
    "motion jpeg": (lambda: video_file(pictures(2), codec="mjpeg"), "codec mjpeg is not"),
}
URLS: dict[str, str] = {
    "http://127.0.0.1/a": "not on the public internet",
    "http://localhost:80/a": "not on the public internet",
    "http://2130706433/a": "not on the public internet",
    "http://0x7f.1/a": "not on the public internet",
    "http://[::ffff:169.254.169.254]/a": "not on the public internet",
    "http://169.254.169.254/latest/meta-data": "not on the public internet",
    "http://10.0.0.1@192.168.1.1/a": "not on the public internet",
    "file:///etc/passwd": "neither http, https nor data",
    "ftp://example.com/a": "neither http, https nor data",
    "blob:abc": "is internal",
    "file-../../etc": "does not exist",
    "data:image/png;base64,%%%": "not base64",
    "data:image/png,abc": "of the form data:",
    "http://" + "a" * 9000: "longer than",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    tmp_path_factory: pytest.TempPathFactory, nats_server: Server, redis_server: Server
) -> AsyncIterator[SpeechMesh]:
    directory = tmp_path_factory.mktemp("omni")
    (directory / "thinker").mkdir()
    plain = media_checkpoint(directory / "thinker", OMNI)
    bus, redis = bus_settings_of(nats_server), redis_settings_of(redis_server)
    checkpoint = whole_checkpoint(directory / "whole", plain)
    async with SpeechMesh(checkpoint, bus, redis, max_model_len=1024) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def speech(
    tmp_path_factory: pytest.TempPathFactory, nats_server: Server, redis_server: Server
) -> AsyncIterator[SpeechMesh]:
    bus, redis = bus_settings_of(nats_server), redis_settings_of(redis_server)
    checkpoint = whisper(tmp_path_factory.mktemp("whisper"))
    async with SpeechMesh(checkpoint, bus, redis, served_model_name=(SPEECH,)) as mesh:
        yield mesh


def uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part_of(kind: str, url: str) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def body_of(*parts: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "what"}]}]
    return {"model": NAME, "messages": messages, "max_tokens": 2, "temperature": 0}


async def check_refused(mesh: SpeechMesh, path: str, reason: str, **request: Any) -> dict[str, Any]:
    """The error, which came in time, while a chat of text was answered."""
    started_s = time.monotonic()
    other = mesh.client.post("/v1/chat/completions", json=body_of())
    refusal = mesh.client.post(path, **request)
    response, text = await asyncio.gather(refusal, other)
    assert time.monotonic() - started_s < MAX_S
    assert text.status_code == 200, text.text
    assert 400 <= response.status_code < 500, response.text
    error = dict(response.json()["error"])
    assert any(each in error["message"] for each in reason.split("|")), error
    assert re.search(r"0x[0-9a-f]{6}|BytesIO", error["message"]) is None, error
    return error


def memory() -> int:
    """Return the memory of this process, which holds the services, and of those that decode."""
    found = psutil.Process()
    return int(sum(each.memory_info().rss for each in [found, *found.children(recursive=True)]))


CASES = [
    *(("image", name) for name in IMAGES),
    *(("video", name) for name in VIDEOS),
    *(("audio", name) for name in RECORDINGS),
]
BAD = {"image": IMAGES, "video": VIDEOS, "audio": RECORDINGS}


@pytest.mark.parametrize(("kind", "name"), CASES)
async def test_bad_media_of_a_chat_are_refused(mesh: SpeechMesh, kind: str, name: str) -> None:
    make, reason = BAD[kind][name]
    body = body_of(part_of(kind, uri(make(), f"{kind}/x")))
    before = memory()
    error = await check_refused(mesh, "/v1/chat/completions", reason, json=body)
    assert error["message"].startswith("messages[0].content[0]: "), error
    assert error["param"] == "messages"
    assert memory() - before < GROWTH_BYTES


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
@pytest.mark.parametrize("url", URLS)
async def test_bad_urls_are_refused(mesh: SpeechMesh, kind: str, url: str) -> None:
    body = body_of(part_of(kind, url))
    error = await check_refused(mesh, "/v1/chat/completions", URLS[url], json=body)
    assert error["param"] == "messages"


async def test_bad_media_of_other_routes_are_refused(mesh: SpeechMesh) -> None:
    bad = uri(png_declaring(30_000, 30_000), "image/png")
    data = base64.b64encode(flac_declaring(10_000_000_000, 2.0)).decode()
    audio = {"type": "input_audio", "input_audio": {"data": data, "format": "flac"}}
    for part, reason in (
        ({"type": "input_image", "image_url": bad}, "pixels|too large"),
        (audio, "at most 120 s"),
    ):
        request = {"model": NAME, "input": [{"role": "user", "content": [part]}], "store": False}
        await check_refused(mesh, "/v1/responses", reason, json=request)
    source = {"type": "base64", "media_type": "image/png", "data": bad.partition(",")[2]}
    content = [{"type": "image", "source": source}]
    message = {"model": NAME, "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
    started_s = time.monotonic()
    response = await mesh.client.post("/v1/messages", json=message)
    assert (response.status_code, time.monotonic() - started_s < MAX_S) == (413, True)
    tokenize = {"model": NAME, "messages": [{"role": "user", "content": [part_of("image", bad)]}]}
    await check_refused(mesh, "/tokenize", "pixels|too large", json=tokenize)


async def test_a_bad_image_of_a_realtime_session_fails_its_response_alone(
    mesh: SpeechMesh,
) -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client,
        client.realtime.connect(model=NAME) as talk,
    ):
        bad = uri(png_declaring(30_000, 30_000), "image/png")
        for content in (
            [{"type": "input_image", "image_url": bad}],
            [{"type": "input_text", "text": "what"}],
        ):
            item: Any = {"type": "message", "role": "user", "content": content}
            await talk.conversation.item.create(item=item)
            out_of_band: Any = {"conversation": "none", "input": [item], "max_output_tokens": 2}
            await talk.response.create(response=out_of_band)
            event: Any = None
            async for event in talk:
                if event.type in ("response.done", "error"):
                    break
            if content[0]["type"] == "input_text":
                assert event.response.status in ("completed", "incomplete")
            else:
                assert "pixels" in str(event) or "too large" in str(event), event


@pytest.mark.parametrize("name", RECORDINGS)
async def test_bad_recordings_are_not_transcribed(speech: SpeechMesh, name: str) -> None:
    make, reason = RECORDINGS[name]
    started_s, before = time.monotonic(), memory()
    for route in ("transcriptions", "translations"):
        response = await speech.transcribe(make(), route, model=SPEECH)
        assert 400 <= response.status_code < 500, response.text
        error = response.json()["error"]
        assert any(each in error["message"] for each in reason.split("|")), error
        assert re.search(r"0x[0-9a-f]{6}|BytesIO", error["message"]) is None, error
        assert error["param"] == "file"
    assert time.monotonic() - started_s < 2 * MAX_S
    assert memory() - before < GROWTH_BYTES
