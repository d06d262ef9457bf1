"""Speech in three languages through every route that takes audio, by the client of openai.

espeak-ng makes the speech where it is installed. The same tests run with synthetic syllables.
"""

import base64
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy
import numpy.typing as npt
import openai
import pytest
import pytest_asyncio
import soxr
from openai.types.audio import TranscriptionVerbose
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from tests.fakes.audio_models import audio_checkpoint
from tests.fakes.recordings import RATE, audio_file, syllables
from tests.fakes.speech_mesh import NAME, SpeechMesh
from tests.fakes.whisper import LANGUAGES, whisper
from tests.servers import Server, bus_settings_of, redis_settings_of
from tokenmesh.services.tokenizer_svc.media.audio_file import AudioLimits, decode_audio

ESPEAK: Final = shutil.which("espeak-ng")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.asyncio(loop_scope="module"),
]
SENTENCES: Final = {
    "en": "The quick brown fox jumps over the lazy dog.",
    "de": "Der schnelle braune Fuchs springt über den faulen Hund.",
    "fr": "Le rapide renard brun saute par dessus le chien paresseux.",
}
LIMITS: Final = {"max_audio_bytes": 1_000_000, "realtime_max_audio_s": 10.0}
PCM_RATE: Final = 24000
"""The rate of realtime sessions: the only one in the types of the client."""
HEARING: Final = "hearing-tiny"
TRANSCRIPTION: Final = "conversation.item.input_audio_transcription"
EVENT: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
Samples = npt.NDArray[numpy.float32]
VOICES = [
    pytest.param("syllables"),
    pytest.param(
        "espeak-ng",
        marks=pytest.mark.skipif(ESPEAK is None, reason="espeak-ng is not installed"),
    ),
]


@pytest.fixture(scope="module", params=VOICES)
def speech(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Samples of each sentence, 16 kHz, by language."""
    directory, found = tmp_path_factory.mktemp("speech"), {}
    for seed, (language, sentence) in enumerate(SENTENCES.items()):
        if request.param == "syllables":
            found[language] = syllables(5, seed=seed)
        else:
            found[language] = espeak(directory / f"{language}.wav", language, sentence)
    return found


def espeak(path: Path, language: str, sentence: str) -> Samples:
    subprocess.run([str(ESPEAK), "-v", language, "-w", str(path), sentence], check=True)
    return decode_audio(path.read_bytes(), RATE, AudioLimits(60.0))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    tmp_path_factory: pytest.TempPathFactory, nats_server: Server, redis_server: Server
) -> AsyncIterator[SpeechMesh]:
    checkpoint = whisper(tmp_path_factory.mktemp("whisper"))
    bus, redis = bus_settings_of(nats_server), redis_settings_of(redis_server)
    async with SpeechMesh(checkpoint, bus, redis, LIMITS) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: SpeechMesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(mesh) as client:
        yield client


def client_of(mesh: SpeechMesh) -> openai.AsyncOpenAI:
    url = f"{mesh.url}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


async def test_transcriptions_have_shapes_and_times(
    client: openai.AsyncOpenAI, speech: dict[str, Samples]
) -> None:
    for (language, samples), kind in zip(speech.items(), ("MP3", "FLAC", "OPUS"), strict=True):
        seconds = len(samples) / RATE
        file = (f"speech.{kind.lower()}", audio_file(samples, kind))
        found = await client.audio.transcriptions.create(
            model=NAME,
            file=file,
            language=language,
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
        )
        assert isinstance(found, TranscriptionVerbose)
        assert found.language == language
        # MP3 pads its first and last frames
        assert float(found.duration) == pytest.approx(seconds, abs=0.15)
        assert found.segments
        assert found.words
        for times in (
            [(each.start, each.end) for each in found.segments],
            [(each.start, each.end) for each in found.words],
        ):
            assert all(0 <= start <= end <= float(found.duration) for start, end in times)
            assert times == sorted(times, key=itemgetter(0))
        srt = await client.audio.transcriptions.create(
            model=NAME, file=file, language=language, response_format="srt"
        )
        assert re.match(r"1\n\d\d:\d\d:\d\d,\d{3} --> \d\d:\d\d:\d\d,\d{3}\n", str(srt))
        assert str(srt).count(" --> ") == len(found.segments)


async def test_a_stream_ends_with_the_whole_text(
    client: openai.AsyncOpenAI, speech: dict[str, Samples]
) -> None:
    texts = set()
    for language, samples in speech.items():
        file = ("speech.wav", audio_file(samples))
        stream = await client.audio.transcriptions.create(
            model=NAME, file=file, language=language, stream=True
        )
        events = [event async for event in stream]
        deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
        done = events[-1]
        assert done.type == "transcript.text.done"
        assert len(deltas) == len(events) - 1 > 1
        assert "".join(deltas) == done.text
        assert done.usage is not None
        assert done.usage.input_token_details is not None
        # the encoder has 50 states a second
        assert done.usage.input_token_details.audio_tokens == round(50 * len(samples) / RATE)
        whole = await client.audio.transcriptions.create(model=NAME, file=file, language=language)
        assert whole.text == done.text.strip()
        texts.add(whole.text)
    assert len(texts) == len(SENTENCES)


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # of the client
async def test_a_language_is_detected_and_speech_translated(
    client: openai.AsyncOpenAI, speech: dict[str, Samples]
) -> None:
    for language, samples in speech.items():
        file = ("speech.wav", audio_file(samples))
        found = await client.audio.transcriptions.create(
            model=NAME, file=file, response_format="verbose_json"
        )
        assert found.language in LANGUAGES
        named = await client.audio.transcriptions.create(
            model=NAME, file=file, language=found.language, response_format="verbose_json"
        )
        assert named.text == found.text
        translated = await client.audio.translations.create(
            model=NAME, file=file, extra_body={"language": language}, response_format="json"
        )
        plain = await client.audio.transcriptions.create(model=NAME, file=file, language=language)
        assert translated.text != plain.text


async def test_too_much_speech_is_refused(
    client: openai.AsyncOpenAI, speech: dict[str, Samples]
) -> None:
    # above 1 MB, and above 120 s
    for kind, seconds in (("WAV", 40), ("MP3", 130)):
        long = numpy.resize(speech["en"], seconds * RATE)
        file = ("speech", audio_file(long, kind))
        with pytest.raises(openai.APIStatusError) as caught:
            await client.audio.transcriptions.create(model=NAME, file=file)
        assert caught.value.status_code == 413


def session_of(**audio_input: Any) -> Any:
    form = {"type": "audio/pcm", "rate": PCM_RATE}
    return {"type": "transcription", "audio": {"input": {"format": form, **audio_input}}}


def pcm_of(samples: Samples) -> bytes:
    resampled = soxr.resample(samples, RATE, PCM_RATE)
    return bytes(numpy.round(resampled.clip(-1, 1) * 32767).astype("<i2").tobytes())


async def test_a_realtime_session_hears_the_turns_of_three_speakers(
    mesh: SpeechMesh, client: openai.AsyncOpenAI, speech: dict[str, Samples]
) -> None:
    quiet = numpy.zeros(RATE, numpy.float32)
    parts = [part for each in speech.values() for part in (quiet, each)]
    data = pcm_of(numpy.concatenate([*parts, quiet]))
    detection = {"type": "server_vad", "silence_duration_ms": 700, "threshold": 0.4}
    session = session_of(transcription={"language": "en"}, turn_detection=detection)
    seen: list[Any] = []
    query = {"intent": "transcription"}
    async with client.realtime.connect(model=NAME, extra_query=query) as talk:
        await talk.session.update(session=session)
        for start in range(0, len(data), 9600):
            part = base64.b64encode(data[start : start + 9600]).decode()
            await talk.input_audio_buffer.append(audio=part)
        while sum(each.type == f"{TRANSCRIPTION}.completed" for each in seen) < len(SENTENCES):
            seen.append(EVENT.validate_json(await talk.recv_bytes()))
            assert seen[-1].type != "error", seen[-1]
    assert [each.type for each in seen[:2]] == ["session.created", "session.updated"]
    starts = [each for each in seen if each.type.endswith("speech_started")]
    stops = [each for each in seen if each.type.endswith("speech_stopped")]
    done = [each for each in seen if each.type == f"{TRANSCRIPTION}.completed"]
    ids = [each.item_id for each in starts]
    assert len(set(ids)) == len(SENTENCES)
    assert ids == [each.item_id for each in stops] == [each.item_id for each in done]
    begin_s = 0.0
    for number, (samples, start, stop) in enumerate(
        zip(speech.values(), starts, stops, strict=True)
    ):
        begin_s, end_s = begin_s + 1, begin_s + 1 + len(samples) / RATE
        # 300 ms of padding before, 700 ms of silence after; speech may begin and end softly
        assert begin_s - 0.32 <= start.audio_start_ms / 1000 <= begin_s + 0.2
        assert end_s - 0.1 <= stop.audio_end_ms / 1000 <= end_s + 0.75
        heard = data[
            2 * start.audio_start_ms * PCM_RATE // 1000 : 2 * stop.audio_end_ms * PCM_RATE // 1000
        ]
        assert done[number].usage.seconds == pytest.approx(len(heard) / 2 / PCM_RATE, abs=0.002)
        again = numpy.asarray(numpy.frombuffer(heard, "<i2") / 32768, numpy.float32)
        file = ("turn.wav", audio_file(again, rate=PCM_RATE, subtype="FLOAT"))
        whole = await client.audio.transcriptions.create(model=NAME, file=file, language="en")
        assert done[number].transcript == whole.text
        deltas = [
            each.delta
            for each in seen
            if each.type == f"{TRANSCRIPTION}.delta" and each.item_id == ids[number]
        ]
        assert len(deltas) > 1
        assert "".join(deltas).strip() == whole.text
        begin_s = end_s


async def test_a_realtime_session_refuses_what_exceeds_its_limits_and_continues(
    client: openai.AsyncOpenAI, speech: dict[str, Samples]
) -> None:
    session = session_of(transcription={"language": "fr"}, turn_detection=None)
    query = {"intent": "transcription"}
    sound = base64.b64encode(pcm_of(speech["fr"])).decode()
    async with client.realtime.connect(model=NAME, extra_query=query) as talk:
        await talk.session.update(session=session)
        long = base64.b64encode(bytes(2 * 11 * PCM_RATE)).decode()
        await talk.input_audio_buffer.append(audio=long)
        await talk.input_audio_buffer.append(audio=sound)
        await talk.input_audio_buffer.commit()
        await talk.input_audio_buffer.commit()
        seen: list[Any] = []
        while not seen or seen[-1].type != f"{TRANSCRIPTION}.completed":
            seen.append(EVENT.validate_json(await talk.recv_bytes()))
    too_long, empty = [each.error for each in seen if each.type == "error"]
    assert "at most 10 s" in too_long.message
    assert too_long.param == "audio"
    assert empty.code == "input_audio_buffer_commit_empty"
    assert seen[-1].transcript


async def test_a_model_that_hears_answers_each_sentence(
    tmp_path_factory: pytest.TempPathFactory,
    nats_server: Server,
    redis_server: Server,
    speech: dict[str, Samples],
) -> None:
    checkpoint = audio_checkpoint(tmp_path_factory.mktemp("qwen3_asr"), "qwen3_asr")
    bus, redis = bus_settings_of(nats_server), redis_settings_of(redis_server)
    answers = set()
    hearing = SpeechMesh(checkpoint, bus, redis, served_model_name=(HEARING,))
    async with hearing, client_of(hearing) as client:
        for kind, samples in zip(("wav", "mp3", "flac"), speech.values(), strict=True):
            encoded = base64.b64encode(audio_file(samples, kind.upper())).decode()
            part: Any = {"type": "input_audio", "input_audio": {"data": encoded, "format": kind}}
            found = await client.chat.completions.create(
                model=HEARING,
                messages=[{"role": "user", "content": [part, {"type": "text", "text": "write"}]}],
                max_tokens=12,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            answers.add(found.choices[0].message.content)
            assert found.usage is not None
            details = found.usage.prompt_tokens_details
            assert details is not None
            # 13 tokens a second
            assert details.audio_tokens == pytest.approx(13 * len(samples) / RATE, abs=3)
    assert len(answers) == len(SENTENCES)
