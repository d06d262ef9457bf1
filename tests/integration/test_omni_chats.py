"""Chats with Qwen3-Omni's thinker through a whole mesh: images, recordings, videos with sound.

Answers are those of transformers. One mesh serves all tests.
"""

import asyncio
import base64
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.fakes.images import data_uri, image_file
from tests.fakes.media_family import Items, several
from tests.fakes.media_family import image as image_of
from tests.fakes.media_family import recording as recording_of
from tests.fakes.omni import FILM, OPTIONS, Omni
from tests.fakes.recordings import audio_file, tones
from tests.fakes.speech_mesh import NAME, SpeechMesh
from tests.fakes.videos import pictures, video_file
from tests.servers import Server, bus_settings_of, redis_settings_of
from tokenmesh.services.mm_encoder_svc.tower import Tower
from tokenmesh.services.tokenizer_svc.media.audio_file import AudioLimits, Samples, decode_audio
from tokenmesh.shared.errors import Unavailable
from tokenmesh.shared.messages.media import AUDIO, IMAGE, VIDEO

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(120),
]
NUM_TOKENS = 16
MIXED: Items = ((IMAGE, 1), (AUDIO, 2), (FILM, 1), (IMAGE, 2), (AUDIO, 1), (FILM, 2))
TOKENS = {IMAGE: "image_token_id", VIDEO: "video_token_id", AUDIO: "audio_token_id"}


@cache
def film_file(seed: int) -> bytes:
    """A video with sound that becomes whole frames of the spectrogram: in a batch transformers
    counts the rest of one as a frame, alone it does not."""
    frames = pictures(8 + 3 * seed, *((48, 32), (32, 56))[seed % 2], seed=seed)
    return video_file(frames, fps=8, sound=tones(0.9 + 0.3 * seed, seed=10 + seed))


class Films(Omni):
    """Prompts as the template writes them, and files of videos that have their sound."""

    def text(self, items: Items) -> str:
        parts = [f"{self.placeholder(kind)}number {seed}" for kind, seed in items]
        return f"<|im_start|>user\n{''.join(parts)}end<|im_end|>\n<|im_start|>assistant\n"

    def film(self, kind: str, seed: int) -> tuple[bytes, Samples | None]:
        data = film_file(seed)
        return data, decode_audio(data, 16000, AudioLimits(60.0)) if kind == FILM else None

    def answer(self, items: Items) -> str:
        """The text of transformers' answer."""
        return str(self.tokenizer.decode(self.expected(items)[1][:NUM_TOKENS], False))

    def counts(self, items: Items) -> dict[str, int]:
        """Tokens of each modality; those of a video's sound are of the video."""
        of_item = dict.fromkeys(TOKENS, 0)
        for item in self.job(items).media:
            of_item[item.kind] += item.num_embeddings
        ids, config = self.expected(items)[0], self.model.config
        assert sum(of_item.values()) == sum(ids.count(getattr(config, n)) for n in TOKENS.values())
        return {kind: count for kind, count in of_item.items() if count}


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Films:
    return Films.load(tmp_path_factory.mktemp("omni"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(omni: Films, nats_server: Server, redis_server: Server) -> AsyncIterator[SpeechMesh]:
    bus, redis = bus_settings_of(nats_server), redis_settings_of(redis_server)
    async with SpeechMesh(omni.directory, bus, redis, max_model_len=1024) as mesh:
        yield mesh


def part_of(kind: str, seed: int) -> dict[str, Any]:
    if kind == IMAGE:
        return {"type": "image_url", "image_url": {"url": data_uri(image_file(image_of(seed)))}}
    if kind == AUDIO:
        data = base64.b64encode(audio_file(recording_of(seed), subtype="FLOAT")).decode()
        return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    data = base64.b64encode(film_file(seed)).decode()
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}}


def body_of(items: Items, **fields: Any) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for kind, seed in items:
        content += [part_of(kind, seed), {"type": "text", "text": f"number {seed}"}]
    content.append({"type": "text", "text": "end"})
    heard = any(kind == FILM for kind, _ in items)
    return {
        "model": NAME,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "mm_processor_kwargs": {**OPTIONS, "use_audio_in_video": heard},
        **fields,
    }


async def chat(mesh: SpeechMesh, items: Items, **fields: Any) -> dict[str, Any]:
    response = await mesh.client.post("/v1/chat/completions", json=body_of(items, **fields))
    assert response.status_code == 200, response.text
    return dict(response.json())


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


PROMPTS: dict[str, Items] = {
    "image": several(IMAGE, 1),
    "recordings": several(AUDIO, 1, 2, 3),
    "video": several(VIDEO, 1),
    "video with its sound": several(FILM, 2),
    "mixed": MIXED,
    "text": (),
}


@pytest.mark.parametrize("name", PROMPTS)
async def test_an_answer_is_that_of_transformers(mesh: SpeechMesh, omni: Films, name: str) -> None:
    items = PROMPTS[name]
    found = await chat(mesh, items)
    assert text_of(found) == omni.answer(items)
    counts, details = omni.counts(items), found["usage"]["prompt_tokens_details"] or {}
    assert found["usage"]["prompt_tokens"] == len(omni.expected(items)[0])
    for kind in TOKENS:
        assert details.get(f"{kind}_tokens", 0) == counts.get(kind, 0)
    assert (details.get("multimodal_tokens") or {}) == counts


async def test_a_stream_has_the_same_text_and_usage(mesh: SpeechMesh, omni: Films) -> None:
    body = body_of(MIXED)
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client:
        extra = {key: body.pop(key) for key in ("ignore_eos", "skip_special_tokens")}
        extra["mm_processor_kwargs"] = body.pop("mm_processor_kwargs")
        stream = await client.chat.completions.create(
            **body, stream=True, stream_options={"include_usage": True}, extra_body=extra
        )
        chunks = [chunk async for chunk in stream]
    pieces = [each.choices[0].delta.content or "" for each in chunks if each.choices]
    assert "".join(pieces) == omni.answer(MIXED)
    assert len(pieces) > 2
    details = chunks[-1].usage.prompt_tokens_details
    counts = omni.counts(MIXED)
    assert (details.audio_tokens, details.image_tokens) == (counts[AUDIO], counts[IMAGE])


async def test_prompts_at_the_same_time_do_not_mix(mesh: SpeechMesh, omni: Films) -> None:
    answers = await asyncio.gather(*(chat(mesh, items) for items in PROMPTS.values()))
    assert [text_of(each) for each in answers] == [omni.answer(each) for each in PROMPTS.values()]
    again = await chat(mesh, MIXED)
    assert text_of(again) == omni.answer(MIXED)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_a_video_without_sound_is_another_item_than_one_with_it(
    mesh: SpeechMesh, omni: Films
) -> None:
    seen, heard = several(VIDEO, 2), several(FILM, 2)
    answers = [text_of(await chat(mesh, items)) for items in (seen, heard, seen)]
    assert answers == [omni.answer(items) for items in (seen, heard, seen)]
    assert answers[0] != answers[1]


SILENT = base64.b64encode(video_file(pictures(8, 48, 32), fps=8)).decode()
REFUSED: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    (
        [{"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{SILENT}"}}],
        {"use_audio_in_video": True},
        "use_audio_in_video: the file holds no audio",
    ),
    ([part_of(FILM, 1)], {"use_audio_in_video": True, "num_frames": 4}, "exclude each other"),
    ([part_of(FILM, 1)], {"use_audio_in_video": 1}, "is not true or false"),
    ([part_of(AUDIO, 1)] * 101, {}, "101 recordings, at most"),
]


@pytest.mark.parametrize(("parts", "options", "reason"), REFUSED)
async def test_what_cannot_be_seen_or_heard_is_refused(
    mesh: SpeechMesh, parts: list[dict[str, Any]], options: dict[str, Any], reason: str
) -> None:
    body = body_of((), messages=[{"role": "user", "content": parts}], mm_processor_kwargs=options)
    response = await mesh.client.post("/v1/chat/completions", json=body)
    assert (response.status_code, reason in response.text) == (400, True), response.text


async def test_a_response_hears_and_sees_the_same(mesh: SpeechMesh, omni: Films) -> None:
    items: Items = ((IMAGE, 2), (AUDIO, 3))
    body = body_of(items)
    content = body["messages"][0]["content"]
    for part in content:
        if part["type"] == "text":
            part["type"] = "input_text"
        if part["type"] == "image_url":
            part |= {"type": "input_image", "image_url": part["image_url"]["url"]}
    request = {
        "model": NAME,
        "input": [{"role": "user", "content": content}],
        "max_output_tokens": NUM_TOKENS,
        "store": False,
        **{key: body[key] for key in ("temperature", "ignore_eos", "skip_special_tokens")},
        "mm_processor_kwargs": dict(OPTIONS),
    }
    response = await mesh.client.post("/v1/responses", json=request)
    assert response.status_code == 200, response.text
    found = response.json()
    assert found["output"][-1]["content"][0]["text"] == omni.answer(items)
    counts, details = omni.counts(items), found["usage"]["input_tokens_details"]
    assert details["audio_tokens"] == counts[AUDIO]
    assert details["image_tokens"] == counts[IMAGE]


async def test_an_encoder_that_fails_once_does_not_fail_the_chat(
    mesh: SpeechMesh, omni: Films, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, num_calls = Tower._encode_alike, 0

    def failing(tower: Tower, batch: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise Unavailable("the encoder is about to stop")
        return encode(tower, batch)

    monkeypatch.setattr(Tower, "_encode_alike", failing)
    items = several(AUDIO, 5)
    assert text_of(await chat(mesh, items)) == omni.answer(items)
    assert num_calls > 1


@pytest.mark.parametrize(
    ("route", "fields", "asked"),
    [
        ("transcriptions", {}, "Transcribe this audio."),
        ("transcriptions", {"language": "fr"}, "Transcribe this audio into French."),
        ("transcriptions", {"prompt": "A talk."}, "Transcribe this audio. A talk."),
        ("translations", {}, "Translate this audio into English."),
        ("translations", {"language": "zh"}, "Translate this audio from Chinese into English."),
    ],
)
async def test_a_recording_is_transcribed_or_translated_by_a_chat_about_it(
    mesh: SpeechMesh, route: str, fields: dict[str, str], asked: str
) -> None:
    content = [part_of(AUDIO, 1), {"type": "text", "text": asked}]
    body = {**body_of(()), "messages": [{"role": "user", "content": content}]}
    del body["ignore_eos"], body["skip_special_tokens"]
    chat = await mesh.client.post("/v1/chat/completions", json=body)
    file = audio_file(recording_of(1), subtype="FLOAT")
    found = await mesh.transcribe(file, route, max_completion_tokens=str(NUM_TOKENS), **fields)
    assert found.status_code == 200, found.text
    assert found.json()["text"] == chat.json()["choices"][0]["message"]["content"].strip()
