"""/v1/realtime with audio: buffers, turns, transcripts, against a whole mesh of a tiny whisper."""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy
import openai
import pytest
import pytest_asyncio
import soxr
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from tests.fakes.recordings import tones
from tests.fakes.speech_mesh import NAME, SpeechMesh
from tests.fakes.whisper import WhisperOracle, whisper
from tests.servers import Server, bus_settings_of, redis_settings_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(60),
    pytest.mark.asyncio(loop_scope="module"),
]
RATE = 24000
EVENT: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper(tmp_path_factory.mktemp("whisper"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    checkpoint: Path, nats_server: Server, redis_server: Server
) -> AsyncIterator[SpeechMesh]:
    bus, redis = bus_settings_of(nats_server), redis_settings_of(redis_server)
    gateway = {"realtime_max_audio_s": 5.0}
    async with SpeechMesh(checkpoint, bus, redis, gateway) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> WhisperOracle:
    return WhisperOracle(checkpoint)


class Talk:
    """A connection that checks every event against the client's types."""

    def __init__(self, connection: AsyncRealtimeConnection) -> None:
        self.connection = connection

    async def until(self, kind: str) -> list[Any]:
        events: list[Any] = []
        while not events or events[-1].type != kind:
            events.append(EVENT.validate_json(await self.connection.recv_bytes()))
            assert kind == "error" or events[-1].type != "error", events[-1]
        return events

    async def configure(self, **audio_input: Any) -> None:
        session: Any = {
            "type": "transcription",
            "audio": {
                "input": {"format": {"type": "audio/pcm", "rate": RATE}, **audio_input},
            },
        }
        await self.connection.session.update(session=session)
        await self.until("session.updated")

    async def append(self, samples: bytes, size: int = 6400) -> None:
        for start in range(0, len(samples), size):
            part = base64.b64encode(samples[start : start + size]).decode()
            await self.connection.input_audio_buffer.append(audio=part)


@asynccontextmanager
async def talking(mesh: SpeechMesh) -> AsyncIterator[Talk]:
    client = openai.AsyncOpenAI(
        base_url="http://unused",
        api_key="sk-1",
        websocket_base_url=mesh.url.replace("http", "ws") + "/v1",
    )
    async with (
        client,
        client.realtime.connect(model=NAME, extra_query={"intent": "transcription"}) as connection,
    ):
        talk = Talk(connection)
        (created,) = await talk.until("session.created")
        assert created.session.type == "transcription"
        yield talk


def pcm(samples: Any) -> bytes:
    return bytes((samples * 32767).astype("<i2").tobytes())


def expected(oracle: WhisperOracle, samples: bytes, language: str) -> str:
    heard = numpy.frombuffer(samples, "<i2").astype(numpy.float32) / 32768
    heard = soxr.resample(heard, RATE, 16000)
    prompt = oracle.prompt(language, "transcribe", timed=False)
    return oracle.text(oracle.tokens(oracle.states(heard), prompt, timed=False)).strip()


COMPLETED = "conversation.item.input_audio_transcription.completed"
DELTA = "conversation.item.input_audio_transcription.delta"


async def test_what_the_client_commits_is_transcribed(
    mesh: SpeechMesh, oracle: WhisperOracle
) -> None:
    sound = pcm(tones(1.5, RATE, seed=4))
    async with talking(mesh) as talk:
        await talk.configure(transcription={"language": "de"}, turn_detection=None)
        await talk.append(sound)
        await talk.connection.input_audio_buffer.commit()
        events = await talk.until(COMPLETED)
        assert [each.type for each in events[:3]] == [
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
        ]
        deltas = [each.delta for each in events if each.type == DELTA]
        done = events[-1]
        assert len(deltas) > 1
        assert "".join(deltas).strip() == done.transcript == expected(oracle, sound, "de")
        assert {each.item_id for each in events[3:]} == {events[0].item_id}
        assert done.usage.seconds == pytest.approx(1.5)
        await talk.connection.conversation.item.retrieve(item_id=done.item_id)
        (found,) = await talk.until("conversation.item.retrieved")
        assert found.item.content[0].transcript == done.transcript
        # cleared audio is not part of the next item
        await talk.append(sound)
        await talk.connection.input_audio_buffer.clear()
        await talk.until("input_audio_buffer.cleared")
        await talk.connection.input_audio_buffer.commit()
        error = (await talk.until("error"))[-1]
        assert error.error.code == "input_audio_buffer_commit_empty"


async def test_the_server_finds_turns(mesh: SpeechMesh, oracle: WhisperOracle) -> None:
    quiet = pcm(numpy.zeros(RATE, numpy.float32))
    first, second = pcm(tones(1.0, RATE, seed=6)), pcm(tones(0.8, RATE, seed=7))
    detection = {"type": "server_vad", "silence_duration_ms": 400, "prefix_padding_ms": 200}
    async with talking(mesh) as talk:
        await talk.configure(transcription={"language": "en"}, turn_detection=detection)
        await talk.append(quiet + first + quiet + second + quiet)
        seen = await talk.until(COMPLETED) + await talk.until(COMPLETED)
    kinds = [each.type for each in seen]
    for kind in ("speech_started", "speech_stopped", "committed"):
        assert kinds.count(f"input_audio_buffer.{kind}") == 2
    starts = [each.audio_start_ms for each in seen if each.type.endswith("speech_started")]
    stops = [each.audio_end_ms for each in seen if each.type.endswith("speech_stopped")]
    assert starts == pytest.approx([800, 2800], abs=80)
    assert stops == pytest.approx([2400, 4200], abs=80)
    whole = quiet + first + quiet + second + quiet
    done = [each for each in seen if each.type == COMPLETED]
    for start_ms, end_ms, event in zip(starts, stops, done, strict=True):
        part = whole[start_ms * RATE // 1000 * 2 : end_ms * RATE // 1000 * 2]
        assert event.transcript == expected(oracle, part, "en")


async def test_bad_audio_is_refused_and_the_session_continues(mesh: SpeechMesh) -> None:
    async with talking(mesh) as talk:
        await talk.configure(transcription={"language": "en"}, turn_detection=None)
        refused = [
            ({"type": "input_audio_buffer.append", "audio": "%%%"}, "not base64"),
            ({"type": "input_audio_buffer.append", "audio": "YWJj"}, "ends within a sample"),
            ({"type": "response.create"}, "no responses"),
            (
                {
                    "type": "input_audio_buffer.append",
                    "audio": base64.b64encode(bytes(400_000)).decode(),
                },
                "at most 5 s",
            ),
            (
                {
                    "type": "session.update",
                    "session": {"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}},
                },
                "semantic_vad",
            ),
            (
                {
                    "type": "session.update",
                    "session": {"audio": {"input": {"format": {"type": "audio/pcmu"}}}},
                },
                "format.type",
            ),
        ]
        for event, text in refused:
            await talk.connection.send(event)  # type: ignore[arg-type]
            error = (await talk.until("error"))[-1]
            assert text in error.error.message, error
        await talk.configure(transcription={"language": "xx"}, turn_detection=None)
        await talk.append(pcm(tones(0.5, RATE)))
        await talk.connection.input_audio_buffer.commit()
        failed = await talk.until("conversation.item.input_audio_transcription.failed")
        assert "'xx'" in failed[-1].error.message
        assert failed[-1].error.code == "invalid_value"
        await talk.configure(transcription={"language": "fr"}, turn_detection=None)
        await talk.append(pcm(tones(0.5, RATE)))
        await talk.connection.input_audio_buffer.commit()
        assert (await talk.until(COMPLETED))[-1].transcript
