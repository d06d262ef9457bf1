"""Recordings that a model transcribes while it listens, through the whole mesh."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import pytest_asyncio
import soxr
import torch
import transformers

from tests.fakes.audio_models import streaming_checkpoint
from tests.fakes.recordings import audio_file, tones
from tests.fakes.speech_mesh import NAME, SpeechMesh
from tests.integration.test_realtime_audio import COMPLETED, DELTA, RATE, pcm, talking
from tests.servers import Server, bus_settings_of, redis_settings_of
from tokenmesh.services.gateway.apis.realtime.item_transcript import ItemTranscripts
from tokenmesh.services.mm_encoder_svc.embeddings import EmbeddingCache
from tokenmesh.services.mm_encoder_svc.speech_states import CausalStates
from tokenmesh.services.tokenizer_svc.media.features import load_audio_features
from tokenmesh.shared.blobs import PREFIX
from tokenmesh.shared.redis import open_redis

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(60),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return streaming_checkpoint(tmp_path_factory.mktemp("streaming"), context=64)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    checkpoint: Path, nats_server: Server, redis_server: Server
) -> AsyncIterator[SpeechMesh]:
    bus, redis = bus_settings_of(nats_server), redis_settings_of(redis_server)
    async with SpeechMesh(checkpoint, bus, redis) as mesh:
        yield mesh


def expected(checkpoint: Path, samples: Any) -> str:
    """Return what transformers writes, until it ends."""
    kind = transformers.VoxtralRealtimeForConditionalGeneration
    model = kind.from_pretrained(checkpoint, dtype=torch.float32).eval()
    features: Any = load_audio_features(checkpoint)
    prompt = [3, *[4] * (features.layout.before + features.layout.delay)]
    with torch.inference_mode():
        ids = model.generate(
            input_ids=torch.tensor([prompt]),
            input_features=torch.tensor(features(samples))[None],
            num_delay_tokens=features.layout.delay,
            max_new_tokens=500,  # fewer: the recording ends
            do_sample=False,
            eos_token_id=2,
            pad_token_id=0,
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    text: str = tokenizer.decode(ids[0, len(prompt) :], skip_special_tokens=True)
    return text.strip()


async def test_a_transcript_is_what_transformers_writes(mesh: SpeechMesh, checkpoint: Path) -> None:
    samples = tones(2.36, seed=2)
    file = audio_file(samples, subtype="FLOAT")
    found = await mesh.transcribe(file)
    assert found.status_code == 200, found.text
    assert found.json()["text"].strip() == expected(checkpoint, samples)
    assert found.json()["text"]
    streamed = await mesh.transcribe(file, stream="true")
    events = [json.loads(each[6:]) for each in streamed.text.split("\n\n") if each[6:7] == "{"]
    assert events[-1]["text"].strip() == found.json()["text"].strip()
    verbose = (await mesh.transcribe(file, response_format="verbose_json")).json()
    assert verbose["duration"] == pytest.approx(2.36)
    assert [(each["start"], each["end"]) for each in verbose["segments"]] == [
        (0.0, pytest.approx(2.36))
    ]


async def test_a_realtime_session_gets_what_transformers_writes(
    mesh: SpeechMesh, checkpoint: Path
) -> None:
    data = pcm(tones(1.7, rate=RATE, seed=1))
    async with talking(mesh) as talk:
        await talk.configure(transcription={"model": NAME}, turn_detection=None)
        await talk.append(data)
        await talk.connection.input_audio_buffer.commit()
        completed = (await talk.until(COMPLETED))[-1]
    assert completed.transcript.strip() == expected(checkpoint, heard(data))


def heard(data: bytes) -> Any:
    """Samples as a client sends them, as the model hears them."""
    samples = numpy.frombuffer(data, "<i2").astype(numpy.float32) / 32768
    return numpy.asarray(soxr.resample(samples, RATE, 16000), dtype=numpy.float32)


def text_of(events: list[Any]) -> str:
    return "".join(each.delta for each in events if each.type == DELTA).strip()


async def test_text_arrives_while_the_speech_goes_on(mesh: SpeechMesh, checkpoint: Path) -> None:
    data = pcm(tones(2.4, rate=RATE, seed=3))
    half = len(data) // 4 * 2
    async with talking(mesh) as talk:
        await talk.configure(transcription={"model": NAME}, turn_detection=None)
        await talk.append(data[:half])
        early = await talk.until(DELTA)  # before the commit
        await talk.append(data[half:])
        await talk.connection.input_audio_buffer.commit()
        events = early + await talk.until(COMPLETED)
    done = events[-1]
    assert done.transcript == text_of(events) == expected(checkpoint, heard(data))
    assert done.usage.seconds == pytest.approx(2.4)
    assert {each.item_id for each in events if each.type in (DELTA, COMPLETED)} == {done.item_id}


async def test_text_of_a_turn_arrives_before_its_end(mesh: SpeechMesh, checkpoint: Path) -> None:
    quiet = pcm(numpy.zeros(RATE, numpy.float32))
    sound = pcm(tones(1.6, RATE, seed=6))
    async with talking(mesh) as talk:
        detection = {"type": "server_vad", "silence_duration_ms": 400, "prefix_padding_ms": 200}
        await talk.configure(transcription={"model": NAME}, turn_detection=detection)
        await talk.append(quiet + sound)
        events = await talk.until(DELTA)
        await talk.append(quiet)
        events += await talk.until(COMPLETED)
    (start_ms,) = (each.audio_start_ms for each in events if each.type.endswith("speech_started"))
    (end_ms,) = (each.audio_end_ms for each in events if each.type.endswith("speech_stopped"))
    part = (quiet + sound + quiet)[start_ms * RATE // 1000 * 2 : end_ms * RATE // 1000 * 2]
    assert events[-1].transcript == text_of(events) == expected(checkpoint, heard(part))


async def test_speech_longer_than_a_window_goes_on_in_the_next_one(
    mesh: SpeechMesh, checkpoint: Path
) -> None:
    data = pcm(tones(5.0, rate=RATE, seed=5))
    window = int(load_audio_features(checkpoint).window_s * RATE)
    assert 2 * RATE < window < 4 * RATE
    async with talking(mesh) as talk:
        await talk.configure(transcription={"model": NAME}, turn_detection=None)
        await talk.append(data)
        await talk.until(DELTA)
        await talk.connection.input_audio_buffer.commit()
        done = (await talk.until(COMPLETED))[-1]
    clips = (heard(data[: 2 * window]), heard(data[2 * window :]))
    whole = "".join(expected(checkpoint, each) for each in clips)
    assert done.transcript.replace(" ", "") == whole.replace(" ", "")


async def test_text_of_cleared_audio_is_no_part_of_the_next_item(
    mesh: SpeechMesh, checkpoint: Path
) -> None:
    first, second = (pcm(tones(1.7, rate=RATE, seed=seed)) for seed in (1, 4))
    async with talking(mesh) as talk:
        await talk.configure(transcription={"model": NAME}, turn_detection=None)
        await talk.append(first)
        dropped = (await talk.until(DELTA))[-1].item_id
        await talk.connection.input_audio_buffer.clear()
        await talk.until("input_audio_buffer.cleared")
        await talk.append(second)
        await talk.connection.input_audio_buffer.commit()
        events = await talk.until(COMPLETED)
    assert dropped not in {each.item_id for each in events if each.type in (DELTA, COMPLETED)}
    assert events[-1].transcript == text_of(events) == expected(checkpoint, heard(second))


async def test_a_client_that_leaves_ends_its_transcript(mesh: SpeechMesh) -> None:
    async with talking(mesh) as talk:
        await talk.configure(transcription={"model": NAME}, turn_detection=None)
        await talk.append(pcm(tones(1.7, rate=RATE, seed=1)))
        await talk.until(DELTA)
        name = ItemTranscripts.live.__qualname__
        tasks = asyncio.all_tasks()
        (live,) = [task for task in tasks if getattr(task.get_coro(), "__qualname__", "") == name]
    await asyncio.wait([live], timeout=20)
    assert live.cancelled()


@pytest.mark.parametrize("lost", ["states", "embeddings", "all"])
async def test_speech_goes_on_after_its_encoder_was_lost(
    mesh: SpeechMesh, checkpoint: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lose what a new encoder lacks, or what has expired in Redis."""
    data = pcm(tones(2.4, rate=RATE, seed=7 + len(lost)))
    half = len(data) // 4 * 2
    async with talking(mesh) as talk:
        await talk.configure(transcription={"model": NAME}, turn_detection=None)
        await talk.append(data[:half])
        events = await talk.until(DELTA)
        for name in ("after", "replace"):
            monkeypatch.setattr(CausalStates, name, forgetting(getattr(CausalStates, name)))
        if lost != "states":
            monkeypatch.setattr(EmbeddingCache, "get", lambda *_: None)
            await forget(mesh, "emb:*" if lost == "embeddings" else "*")
        await talk.append(data[half:])
        await talk.connection.input_audio_buffer.commit()
        events += await talk.until(COMPLETED)
    assert events[-1].transcript == text_of(events) == expected(checkpoint, heard(data))


def forgetting(method: Any) -> Any:
    """The method of states that forget all once."""
    has_forgotten = False

    def once(self: CausalStates, *args: Any) -> Any:
        nonlocal has_forgotten
        if not has_forgotten:
            has_forgotten = True
            self._states.clear()
            self._num_bytes = 0
        return method(self, *args)

    return once


async def forget(mesh: SpeechMesh, pattern: str) -> None:
    """Remove blobs from Redis."""
    redis = open_redis(mesh.settings.redis)
    keys: Any = await redis.call("KEYS", PREFIX + pattern)
    for key in keys:
        await redis.call("DEL", key)
    await redis.close()


async def test_a_transcript_of_speech_is_charged_once(mesh: SpeechMesh) -> None:
    async def audio_seconds() -> float:
        text = (await mesh.client.get("/metrics")).text
        found = re.findall(r"^tokenmesh:audio_seconds_total{.*} (.+)$", text, re.M)
        return sum(map(float, found))

    before = await audio_seconds()
    async with talking(mesh) as talk:
        await talk.configure(transcription={"model": NAME}, turn_detection=None)
        await talk.append(pcm(tones(1.7, rate=RATE, seed=1)))
        await talk.until(DELTA)
        await talk.connection.input_audio_buffer.commit()
        await talk.until(COMPLETED)
    assert await audio_seconds() - before == pytest.approx(1.7, abs=0.01)


async def test_what_such_a_model_cannot_do_is_refused(mesh: SpeechMesh) -> None:
    file = audio_file(tones(0.5))
    language = await mesh.transcribe(file, language="de")
    assert language.status_code == 400
    assert "finds the language itself" in language.text
    translated = await mesh.transcribe(file, "translations")
    assert "does not translate" in translated.text
    chat = {"model": NAME, "prompt": "The quick", "max_tokens": 2}
    refused = await mesh.client.post("/v1/completions", json=chat)
    assert refused.status_code == 400
    assert "a prompt has one, added to all tokens" in refused.text
