"""Chats with recordings, over HTTP and in realtime sessions, against transformers' answers.

One mesh serves all tests.
"""

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy
import openai
import pytest
import pytest_asyncio
import torch
from transformers import AutoTokenizer

from tests.fakes.audio_models import AUDIO, audio_checkpoint, audio_oracle, their_inputs
from tests.fakes.images import data_uri as image_uri
from tests.fakes.images import image_file, picture
from tests.fakes.recordings import audio_file, tones
from tests.fakes.speech_mesh import NAME, SpeechMesh
from tests.servers import Server, bus_settings_of, redis_settings_of
from tokenmesh.services.tokenizer_svc.media.audio_file import Samples

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]
FAMILY = "qwen2_audio"
SOUND = tones(1.3, seed=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return audio_checkpoint(tmp_path_factory.mktemp(FAMILY), FAMILY)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    checkpoint: Path, nats_server: Server, redis_server: Server
) -> AsyncIterator[SpeechMesh]:
    bus, redis = bus_settings_of(nats_server), redis_settings_of(redis_server)
    limits = {"limit_mm_per_prompt": {"audio": 2}}
    async with SpeechMesh(checkpoint, bus, redis, **limits) as mesh:
        yield mesh


class Oracle:
    """transformers' answers to conversations of one message."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = audio_oracle(directory, FAMILY)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)

    def answer(self, text: str, *recordings: Samples, count: int = 16) -> str:
        """Greedy; text: of the message, as the template writes it."""
        prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        inputs = their_inputs(self.directory, FAMILY, prompt, list(recordings))
        with torch.inference_mode():
            ids = self.model.generate(
                **inputs, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        return str(self.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :]))


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


PLACE = AUDIO[FAMILY].placeholder


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def sound(data: bytes, kind: str = "wav") -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": encoded, "format": kind}}


def wav(samples: Samples = SOUND) -> bytes:
    return audio_file(samples, subtype="FLOAT")


async def chat(mesh: SpeechMesh, *parts: Any, **fields: Any) -> Any:
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": list(parts)}],
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,
        **fields,
    }
    return await mesh.client.post("/v1/chat/completions", json=body)


async def answer(mesh: SpeechMesh, *parts: Any, **fields: Any) -> str:
    response = await chat(mesh, *parts, **fields)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


async def test_an_answer_is_that_of_transformers(mesh: SpeechMesh, oracle: Oracle) -> None:
    other = tones(0.7, seed=5)
    given = await answer(mesh, text("first "), sound(wav()), text("then "), sound(wav(other)))
    assert given == oracle.answer(f"first {PLACE}then {PLACE}", SOUND, other)
    assert await answer(mesh, text("quiet")) == oracle.answer("quiet")


async def test_a_recording_may_come_from_every_source(mesh: SpeechMesh, oracle: Oracle) -> None:
    data = wav()
    uri = f"data:audio/wav;base64,{base64.b64encode(data).decode()}"
    upload = await mesh.client.post(
        "/v1/files", files={"file": ("a.wav", data)}, data={"purpose": "user_data"}
    )
    assert upload.status_code == 200, upload.text
    short = audio_file(tones(0.2, seed=1))  # below what the gateway moves to the blob store
    expected = oracle.answer(f"{PLACE}what", SOUND)
    for part in (
        sound(data),
        {"type": "audio_url", "audio_url": {"url": uri}},
        {"type": "audio_url", "audio_url": uri},
        {"type": "input_audio", "file_id": upload.json()["id"]},
    ):
        assert await answer(mesh, part, text("what")) == expected
    once = await answer(mesh, sound(short))
    again = await answer(mesh, {**sound(short), "uuid": "mine"})
    assert once == again == await answer(mesh, {"type": "input_audio", "uuid": "mine"})


async def test_a_stream_and_a_response_hear_the_same(mesh: SpeechMesh, oracle: Oracle) -> None:
    expected = oracle.answer(f"{PLACE}what", SOUND)
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client:
        extra = {"ignore_eos": True, "skip_special_tokens": False}
        parts: Any = [sound(wav()), text("what")]
        stream = await client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": parts}],
            max_tokens=16,
            temperature=0,
            stream=True,
            extra_body=extra,
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == expected
        items: Any = [sound(wav()), {"type": "input_text", "text": "what"}]
        response = await client.responses.create(
            model=NAME,
            input=[{"role": "user", "content": items}],
            max_output_tokens=16,
            temperature=0,
            store=False,
            extra_body=extra,
        )
        assert response.output_text == expected


REFUSED: list[tuple[list[Any], int, str]] = [
    ([sound(wav())] * 3, 400, "3 recordings, at most 2"),
    ([sound(b"no audio at all, but text" * 4)], 400, "not audio of a known format"),
    ([sound(audio_file(tones(2.0), "FLAC")[:2000])], 400, "flac file is damaged"),
    ([sound(wav(tones(4.5)))], 413, "the model takes at most 4 s"),
    ([sound(wav(tones(0.05)))], 400, "at least 0.1 s"),
    ([{"type": "input_audio"}], 400, "has no recording"),
    ([{"type": "input_audio", "input_audio": {"format": "wav"}}], 400, "data is missing"),
    ([{"type": "input_audio", "input_audio": {"data": "%%%"}}], 400, "not base64"),
    ([{"type": "input_audio", "input_audio": {"data": "blob:x"}}], 400, "internal"),
    ([{"type": "audio_url", "audio_url": {"url": "http://127.0.0.1/a.wav"}}], 400, "not on the"),
    ([{"type": "image_url", "image_url": image_uri(image_file(picture(1)))}], 400, "text and rec"),
]


@pytest.mark.parametrize(("parts", "status", "reason"), REFUSED)
async def test_what_cannot_be_heard_is_refused(
    mesh: SpeechMesh, parts: list[Any], status: int, reason: str
) -> None:
    response = await chat(mesh, *parts)
    error = response.json()["error"]
    assert (response.status_code, reason in error["message"]) == (status, True), error
    assert error["param"] == "messages"


async def test_a_realtime_session_answers_what_it_hears(mesh: SpeechMesh, oracle: Oracle) -> None:
    samples = numpy.round(SOUND * 32767).astype("<i2")
    async with (
        openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client,
        client.realtime.connect(model=NAME) as talk,
    ):
        form = {"type": "audio/pcm", "rate": 16000}
        session: Any = {
            "type": "realtime",
            "output_modalities": ["text"],
            "audio": {"input": {"turn_detection": None, "format": form}},
            "max_output_tokens": 16,
            "temperature": 0,
        }
        await talk.session.update(session=session)
        await talk.input_audio_buffer.append(audio=base64.b64encode(samples.tobytes()).decode())
        await talk.input_audio_buffer.commit()
        await talk.response.create()
        pieces: list[str] = []
        event: Any = None
        async for event in talk:
            assert event.type != "error", event
            if event.type == "response.output_text.delta":
                pieces.append(event.delta)
            if event.type == "response.done":
                break
        assert event.response.status in ("completed", "incomplete"), event.response
        assert pieces
        assert event.response.usage is not None
        heard = samples.astype(numpy.float32) / 32768
        assert "".join(pieces) in oracle.answer(PLACE, numpy.asarray(heard, numpy.float32))
