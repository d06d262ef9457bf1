"""Transcripts by models that hear in chats, against what transformers generates for the prompts of
its own processors.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import openai
import pytest
import pytest_asyncio
import torch
import transformers

from tests.fakes.audio_models import AUDIO, asked_checkpoint, audio_oracle, their_inputs
from tests.fakes.recordings import audio_file, tones
from tests.fakes.speech_mesh import NAME, SpeechMesh
from tests.integration.test_realtime_audio import COMPLETED, DELTA, RATE, pcm, talking
from tests.servers import Server, bus_settings_of, redis_settings_of
from tokenmesh.services.tokenizer_svc.media.audio_cuts import cut_points
from tokenmesh.services.tokenizer_svc.media.audio_file import Samples
from tokenmesh.services.tokenizer_svc.media.recordings import RecordingProcessor
from tokenmesh.services.tokenizer_svc.media.speech import tokens_of_second

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]
SOUND = tones(1.3, seed=2)
COUNT = 12
FAMILIES = [
    "qwen3_asr",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("voxtral", "glmasr", "fun_asr_nano", "audioflamingo3")
    ),
]


@dataclass(eq=False)
class World:
    """A mesh that serves one family, and transformers' own model and processor."""

    family: str
    directory: Path
    mesh: SpeechMesh

    def __post_init__(self) -> None:
        self.model = audio_oracle(self.directory, self.family)
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(self.directory)

    def prompt(self, **asked: Any) -> str:
        """The prompt that the processor writes."""
        if self.family == "voxtral":  # by a package that reads Mistral's files only
            language = f"lang:{asked['language']}" if asked.get("language") else ""
            return f"<s>[INST][BEGIN_AUDIO][AUDIO][/INST]{language}[TRANSCRIBE]"
        names = {"qwen3_asr": "Qwen3ASR", "glmasr": "GlmAsr", "fun_asr_nano": "FunAsrNano"}
        kind = getattr(transformers, f"{names.get(self.family, 'AudioFlamingo3')}Processor")
        maker = kind.__new__(kind)
        maker.tokenizer, maker.chat_template = self.tokenizer, self.tokenizer.chat_template
        maker.feature_extractor = None
        maker.default_transcription_prompt = "Please transcribe this audio into text"
        if self.family == "audioflamingo3":
            maker.default_transcription_prompt = "Transcribe the input speech."
        (text,) = maker.apply_transcription_request(audio=SOUND, tokenize=False, **asked)
        return str(text)

    def answer(self, samples: Samples, **asked: Any) -> str:
        """Greedy."""
        inputs = their_inputs(self.directory, self.family, self.prompt(**asked), [samples])
        with torch.inference_mode():
            ids = self.model.generate(
                **inputs, max_new_tokens=COUNT, do_sample=False, eos_token_id=2, pad_token_id=0
            )
        found = ids[0, inputs["input_ids"].shape[1] :]
        return str(self.tokenizer.decode(found, skip_special_tokens=True)).strip()

    async def text(self, samples: Samples = SOUND, **fields: Any) -> str:
        """Ours."""
        found = await self.mesh.transcribe(wav(samples), max_completion_tokens=COUNT, **fields)
        assert found.status_code == 200, found.text
        return str(found.json()["text"])


def wav(samples: Samples) -> bytes:
    return audio_file(samples, subtype="FLOAT")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FAMILIES)
async def world(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    nats_server: Server,
    redis_server: Server,
) -> AsyncIterator[World]:
    family = request.param
    directory = asked_checkpoint(tmp_path_factory.mktemp(family), family)
    bus, redis = bus_settings_of(nats_server), redis_settings_of(redis_server)
    async with SpeechMesh(directory, bus, redis) as mesh:
        yield World(family, directory, mesh)


ASKED: dict[str, list[dict[str, Any]]] = {
    "qwen3_asr": [{"language": "de"}, {"prompt": "Names: Ada"}, {"language": "zh", "prompt": "a"}],
    "voxtral": [{"language": "fr"}],
    "glmasr": [{"prompt": "What is said?"}],
    "audioflamingo3": [{"prompt": "What is said?"}],
    "fun_asr_nano": [
        {"language": "ja", "prompt": "a talk"},
        {"keywords": ["one", "two"]},
        {"language": "en", "keywords": ["one"]},
    ],
}


async def test_a_transcript_is_what_transformers_generates(world: World) -> None:
    plain = world.answer(SOUND)
    assert plain
    assert await world.text() == plain
    seen = {plain}
    for asked in ASKED[world.family]:
        expected = world.answer(SOUND, **asked)
        fields = {"keywords[]" if key == "keywords" else key: each for key, each in asked.items()}
        assert await world.text(**fields) == expected
        seen.add(expected)
    assert len(seen) > 1  # what was asked has an effect


async def test_a_language_may_be_named_in_full_and_others_are_refused(world: World) -> None:
    async def refusal(**fields: Any) -> Any:
        found = await world.mesh.transcribe(wav(SOUND), **fields)
        assert found.status_code == 400, found.text
        return found.json()["error"]

    if world.family in ("glmasr", "audioflamingo3"):
        error = await refusal(language="en")
        assert (error["param"], "leave language out" in error["message"]) == ("language", True)
    else:
        assert "klingon" in (await refusal(language="klingon"))["message"]
    if world.family == "qwen3_asr":
        assert await world.text(language="German") == world.answer(SOUND, language="de")
    if world.family == "voxtral":
        assert (await refusal(prompt="names"))["param"] == "prompt"
    else:
        error = await refusal(prompt=f"a {world.tokenizer.eos_token}")
        assert (error["param"], "special tokens" in error["message"]) == ("prompt", True)
    if world.family != "fun_asr_nano":
        assert (await refusal(hotwords="a,b"))["param"] == "keywords"
    error = await refusal(response_format="verbose_json", **{"timestamp_granularities[]": "word"})
    assert error["param"] == "timestamp_granularities"
    translated = await world.mesh.transcribe(wav(SOUND), "translations")
    assert (translated.status_code, translated.json()["error"]["param"]) == (400, "model")


async def test_a_long_recording_becomes_segments_of_its_clips(world: World) -> None:
    pause = numpy.zeros(1600, numpy.float32)
    long = numpy.tile(numpy.concatenate([SOUND, pause]), 30)
    tokens = tokens_of_second(RecordingProcessor(world.directory))
    window_s = min(1800.0 if world.family == "voxtral" else 30.0, 1024 / 2 / tokens)
    cuts = cut_points(long, 16000, window_s)
    assert len(cuts) > 1
    file = wav(long)
    fields: dict[str, Any] = {"max_completion_tokens": COUNT, "response_format": "verbose_json"}
    found = (await world.mesh.transcribe(file, **fields)).json()
    segments = found["segments"]
    assert len(segments) == len(cuts)
    for each, (start, end) in zip(segments, cuts, strict=True):
        assert each["text"] == world.answer(long[start:end])
        assert (each["start"], each["end"]) == (round(start / 16000, 3), round(end / 16000, 3))
    assert segments[-1]["end"] == found["duration"] == 42.0
    assert found["text"].split() == " ".join(each["text"] for each in segments).split()
    assert found["language"] == "unknown"
    lines = (await world.mesh.transcribe(file, **{**fields, "response_format": "srt"})).text
    assert lines.startswith("1\n00:00:00,000 --> ")
    assert "00:00:42,000" in lines


async def test_a_stream_has_the_same_text_and_counts_tokens(world: World) -> None:
    found = await world.mesh.transcribe(wav(SOUND), stream="true", max_completion_tokens=COUNT)
    events = [json.loads(each[6:]) for each in found.text.split("\n\n") if each[6:7] == "{"]
    done = events[-1]
    assert done["text"].strip() == await world.text()
    assert "".join(each["delta"] for each in events[:-1]) == done["text"]
    usage, details = done["usage"], done["usage"]["input_token_details"]
    inputs = their_inputs(world.directory, world.family, world.prompt(), [SOUND])
    assert usage["input_tokens"] == inputs["input_ids"].shape[1]
    embed = world.tokenizer.convert_tokens_to_ids(AUDIO[world.family].tokens["audio_token"])
    assert details["audio_tokens"] == int((inputs["input_ids"] == embed).sum())
    assert usage["input_tokens"] == details["audio_tokens"] + details["text_tokens"]


async def test_a_chat_with_the_same_model_goes_on(world: World) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    found, text = await asyncio.gather(
        world.mesh.client.post("/v1/chat/completions", json=body), world.text()
    )
    assert found.status_code == 200, found.text
    assert text == world.answer(SOUND)


async def test_a_realtime_session_gets_the_transcript_of_an_item(world: World) -> None:
    quiet = pcm(tones(1.7, rate=RATE, seed=1))
    async with talking(world.mesh) as talk:
        await talk.configure(transcription={"model": NAME}, turn_detection=None)
        await talk.append(quiet)
        await talk.connection.input_audio_buffer.commit()
        events = await talk.until(COMPLETED)
    done = events[-1]
    assert done.transcript
    assert done.transcript == "".join(each.delta for each in events if each.type == DELTA).strip()


async def test_the_library_of_openai_transcribes(world: World) -> None:
    async with openai.AsyncOpenAI(base_url=f"{world.mesh.url}/v1", api_key="none") as client:
        found = await client.audio.transcriptions.create(
            model=NAME, file=("a.wav", wav(SOUND)), extra_body={"max_completion_tokens": COUNT}
        )
    assert found.text == world.answer(SOUND)
