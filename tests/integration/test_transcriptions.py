"""Recordings through gateway, tokenizer, encoder and worker, against transformers end to end."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy
import openai
import pytest
import pytest_asyncio
import torch

from tests.fakes.ctranslate2 import plain, whisper_content, write_whisper
from tests.fakes.recordings import RATE, audio_file, tones
from tests.fakes.speech_mesh import NAME, SpeechMesh
from tests.fakes.whisper import END, FIRST_TIME, LANGUAGES, WhisperOracle, whisper
from tests.servers import Server, bus_settings_of, redis_settings_of
from tokenmesh.services.tokenizer_svc.media.audio_cuts import cut_points

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(
    scope="module", params=["transformers", pytest.param("ctranslate2", marks=pytest.mark.slow)]
)
def served(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The checkpoint, or a directory of CTranslate2 that was made of it."""
    if request.param == "transformers":
        yield checkpoint
        return
    folder = tmp_path_factory.mktemp("ctranslate2")
    content = whisper_content(checkpoint, plain(torch.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))  # where it is unpacked
        yield write_whisper(checkpoint, folder / "model", content)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    served: Path, nats_server: Server, redis_server: Server
) -> AsyncIterator[SpeechMesh]:
    gateway = {"audio_clips": 2, "max_audio_bytes": 2_000_000}
    bus, redis = bus_settings_of(nats_server), redis_settings_of(redis_server)
    async with SpeechMesh(served, bus, redis, gateway) as mesh:
        yield mesh


class Oracle(WhisperOracle):
    """From samples to tokens and text."""

    def transcript(self, samples: Any, *, timed: bool = False, **fields: Any) -> list[int]:
        """fields: language, task, previous."""
        states = self.states(samples)
        language = fields.get("language") or self.language(states)
        prompt = self.prompt(language, fields.get("task", "transcribe"), timed=timed)
        return self.tokens(states, [*fields.get("previous", []), *prompt], timed=timed)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


def wav(samples: Any) -> bytes:
    return audio_file(samples, "WAV", subtype="FLOAT")


def audio_seconds(mesh: SpeechMesh) -> float:
    """The gateway's counter."""
    text = mesh.services["gateway"].metrics.render().decode()
    found = re.findall(r"^tokenmesh:audio_seconds_total{.*} (.+)$", text, re.M)
    return sum(map(float, found))


def clips_of(samples: Any) -> list[Any]:
    return [samples[start:end] for start, end in cut_points(samples, RATE, 4.0)]


async def test_text_is_that_of_transformers(mesh: SpeechMesh, oracle: Oracle) -> None:
    sound = tones(2.5, seed=1)
    language = oracle.language(oracle.states(sound))
    wanted = oracle.text(oracle.transcript(sound)).strip()
    assert len(wanted) > 10
    answer = await mesh.transcribe(wav(sound))
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"text": wanted, "usage": {"type": "duration", "seconds": 2.5}}
    assert answer.headers["content-type"] == "application/json"
    other = next(each for each in LANGUAGES if each != language)
    answer = await mesh.transcribe(wav(sound), language=other, response_format="text")
    assert answer.text == oracle.text(oracle.transcript(sound, language=other)).strip() + "\n"
    assert answer.headers["content-type"].startswith("text/plain")
    answer = await mesh.transcribe(wav(sound), "translations", language=other)
    translated = oracle.transcript(sound, language=other, task="translate")
    assert answer.json()["text"] == oracle.text(translated).strip() != wanted
    prompt = "the quick brown fox"
    previous = oracle.tokenizer.get_prompt_ids(prompt).tolist()
    text = oracle.text(oracle.transcript(sound, previous=previous)).strip()
    assert text != wanted
    answer = await mesh.transcribe(wav(sound), prompt=prompt, language=language)
    assert answer.json()["text"] == text


async def test_segments_are_those_of_transformers(mesh: SpeechMesh, oracle: Oracle) -> None:
    sound = tones(3.0, seed=2)
    language = oracle.language(oracle.states(sound))
    tokens = oracle.transcript(sound, timed=True)
    answer = await mesh.transcribe(
        wav(sound),
        response_format="verbose_json",
        **{"timestamp_granularities[]": "segment"},
    )
    body = answer.json()
    assert body["task"] == "transcribe"
    assert body["language"] == language
    assert body["duration"] == 3.0
    assert body["segments"]
    times = [(token - FIRST_TIME) * 0.02 for token in tokens if token >= FIRST_TIME]
    starts = {round(min(each, 3.0), 3) for each in times}
    assert {each["start"] for each in body["segments"]} <= starts
    written = [token for each in body["segments"] for token in each["tokens"]]
    assert written == [token for token in tokens if token < END]
    ends = [each["end"] for each in body["segments"]]
    assert ends == sorted(ends)
    assert ends[-1] <= 3.0
    for number, each in enumerate(body["segments"]):
        assert each["id"] == number
        assert each["avg_logprob"] < 0
        assert 0 < each["no_speech_prob"] < 1
        assert each["compression_ratio"] > 0
    srt = (await mesh.transcribe(wav(sound), response_format="srt")).text
    assert srt.startswith("1\n00:00:0")
    assert srt.count(" --> ") == len(body["segments"])
    vtt = (await mesh.transcribe(wav(sound), response_format="vtt")).text
    assert vtt.startswith("WEBVTT\n\n00:00:0")


async def test_words_are_those_of_transformers(mesh: SpeechMesh, oracle: Oracle) -> None:
    sound = tones(2.5, seed=1)
    states = oracle.states(sound)
    language = oracle.language(states)
    tokens, prompt = (
        oracle.transcript(sound, timed=True),
        oracle.prompt(language, "transcribe", timed=True),
    )
    ends_s = oracle.ends_s(states, prompt, tokens, 2.5)
    assert len(set(ends_s)) > 3
    fields: dict[str, Any] = {
        "timestamp_granularities[]": "word",
        "response_format": "verbose_json",
    }
    answer = await mesh.transcribe(wav(sound), **fields)
    body = answer.json()
    given = [(each["word"], each["start"], each["end"]) for each in body["words"]]
    names = {"en": "english", "de": "german", "fr": "french", "es": "spanish"}
    expected = oracle.words(tokens, ends_s, names[language])
    assert len(expected) > 2
    assert [each[0] for each in given] == [each[0] for each in expected]
    for ours, theirs in zip(given, expected, strict=True):
        assert ours[1:] == pytest.approx(theirs[1:], abs=0.021)
    assert "segments" not in body
    both = {**fields, "timestamp_granularities[]": ["word", "segment"]}
    body = (await mesh.transcribe(wav(tones(9.0, seed=3)), **both)).json()
    assert body["segments"]
    starts = [each["start"] for each in body["words"]]
    assert starts == sorted(starts)
    assert starts[-1] > 2


async def test_long_recordings_are_cut_and_joined(mesh: SpeechMesh, oracle: Oracle) -> None:
    sound = tones(13.0, seed=3)
    before = audio_seconds(mesh)
    clips = clips_of(sound)
    language = oracle.language(oracle.states(clips[0]))
    ids = [oracle.transcript(clip, language=language) for clip in clips]
    wanted = "".join(map(oracle.text, ids))
    answer = await mesh.transcribe(wav(sound))
    assert answer.json()["text"] == wanted.strip()
    assert answer.json()["usage"]["seconds"] == 13.0
    assert audio_seconds(mesh) - before == pytest.approx(13.0, abs=0.01)
    events = [
        json.loads(line.removeprefix("data: "))
        for line in (await mesh.transcribe(wav(sound), stream="true")).text.split("\n\n")
        if line and line != "data: [DONE]"
    ]
    *deltas, done = events
    assert {each["type"] for each in deltas} == {"transcript.text.delta"}
    assert done["type"] == "transcript.text.done"
    assert "".join(each["delta"] for each in deltas) == done["text"]
    assert done["text"].strip() == wanted.strip()
    usage = done["usage"]
    assert usage["input_token_details"]["audio_tokens"] == 650
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    verbose = (await mesh.transcribe(wav(sound), response_format="verbose_json")).json()
    starts = [each["start"] for each in verbose["segments"]]
    assert starts == sorted(starts)
    assert starts[-1] > 9


async def test_an_implausible_clip_is_drawn_at_further_temperatures(
    mesh: SpeechMesh, oracle: Oracle
) -> None:
    sound = tones(2.5, seed=1)
    fields: dict[str, Any] = {"response_format": "verbose_json", "seed": "5", "language": "en"}
    greedy = (await mesh.transcribe(wav(sound), **fields)).json()["segments"]
    # a greedy text of random weights is likely enough to be taken, or not
    is_doubtful = greedy[0]["avg_logprob"] < -1 or greedy[0]["compression_ratio"] > 2.4
    given = {**fields, "temperatures[]": ["0", "0.5"]}
    first, again = [(await mesh.transcribe(wav(sound), **given)).json() for _ in range(2)]
    assert first == again
    assert {each["temperature"] for each in first["segments"]} == {0.5 if is_doubtful else 0.0}
    assert (first["segments"] == greedy) is not is_doubtful
    given = {**fields, "temperature": "0.5"}
    hot = (await mesh.transcribe(wav(sound), **given)).json()
    if is_doubtful:
        assert hot["segments"] == first["segments"]


async def test_bad_forms_and_files_are_refused_by_name(mesh: SpeechMesh) -> None:
    sound = wav(tones(0.5))
    cases: list[tuple[bytes, dict[str, Any], int, str]] = [
        (b"not audio", {}, 400, "file: the file is not audio of a known format"),
        (sound[:40], {}, 400, "holds no samples"),
        (b"", {}, 400, "empty"),
        (bytes(3_000_000), {}, 413, "larger than 2000000 bytes"),
        (
            audio_file(numpy.zeros(8000 * 150, numpy.float32), "FLAC", 8000),
            {},
            413,
            "at most 120 s",
        ),
        (sound, {"response_format": "yaml"}, 400, "response_format"),
        (sound, {"language": "klingon"}, 400, "'klingon' is not one of"),
        (sound, {"temperature": "hot"}, 400, "temperature"),
        (sound, {"temperatures": "hot"}, 400, "temperatures"),
        (sound, {"n": "2"}, 400, "n is not supported"),
        (sound, {"use_beam_search": "true"}, 400, "use_beam_search is not supported"),
        (sound, {"stream": "true", "response_format": "srt"}, 400, "stream needs response_format"),
        (sound, {"timestamp_granularities[]": "segment"}, 400, "needs response_format"),
        (sound, {"timestamp_granularities[]": "word"}, 400, "needs response_format"),
        (sound, {"prompt": "a <|translate|> b"}, 400, "special tokens"),
        (sound, {"prompt": "x" * 5000}, 400, "prompt"),
        (sound, {"model": "other"}, 404, "other"),
    ]
    for file, fields, status, text in cases:
        answer = await mesh.transcribe(file, **fields)
        assert answer.status_code == status, (fields, answer.text)
        assert text in answer.json()["error"]["message"], answer.text
    answer = await mesh.client.post("/v1/audio/transcriptions", json={"model": NAME})
    assert answer.status_code == 415
    answer = await mesh.client.post("/v1/audio/transcriptions", data={"model": NAME})
    assert answer.status_code in (400, 415)
    answer = await mesh.transcribe(sound, strange="yes")
    assert "strange" in answer.headers["x-tokenmesh-warning"]


async def test_a_text_prompt_without_a_recording_is_refused(mesh: SpeechMesh) -> None:
    body = {"model": NAME, "prompt": "hello", "max_tokens": 4}
    answer = await mesh.client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "transcribes recordings" in answer.json()["error"]["message"]


async def test_the_refusal_of_a_chat_names_the_route_for_recordings(mesh: SpeechMesh) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}]}
    response = await mesh.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "/v1/audio/transcriptions" in response.json()["error"]["message"]


async def test_the_client_of_openai_needs_no_change(mesh: SpeechMesh, oracle: Oracle) -> None:
    sound = tones(2.0, seed=5)
    wanted = oracle.text(oracle.transcript(sound)).strip()
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client:
        create = client.audio.transcriptions.create
        file = ("speech.mp3", wav(sound))
        plain = await create(model=NAME, file=file)
        assert plain.text == wanted
        assert plain.usage is not None
        verbose = await create(
            model=NAME,
            file=file,
            response_format="verbose_json",
            timestamp_granularities=["segment"],
        )
        assert verbose.segments
        assert await create(model=NAME, file=file, response_format="text") == wanted + "\n"
        events = [each async for each in await create(model=NAME, file=file, stream=True)]
        assert events[-1].type == "transcript.text.done"
        assert events[-1].text.strip() == wanted
        with pytest.warns(DeprecationWarning, match="deprecated"):  # of the client
            translated = await client.audio.translations.create(model=NAME, file=file)
        assert translated.text
