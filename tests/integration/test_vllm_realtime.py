"""/v1/realtime as vLLM's two example clients use it, against whole meshes of tiny models."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import pytest_asyncio
import websockets

from tests.fakes.audio_models import asked_checkpoint, streaming_checkpoint
from tests.fakes.recordings import audio_file, tones
from tests.fakes.speech_mesh import NAME, SpeechMesh
from tests.fakes.whisper import whisper
from tests.integration.test_realtime_audio import pcm
from tests.servers import Server, bus_settings_of, redis_settings_of
from tokenmesh.services.gateway.apis.realtime.item_transcript import ItemTranscripts
from tokenmesh.services.gateway.core.tenancy.admission import Admission
from tokenmesh.shared.errors import InvalidInput

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(60),
]
RATE = 16000
COMMIT = "input_audio_buffer.commit"
MODELS = ["whisper", "streaming", "qwen3_asr"]


@dataclass
class World:
    name: str
    mesh: SpeechMesh

    async def text(self, samples: Any) -> str:
        """Return the transcript by the route of recordings."""
        found = await self.mesh.transcribe(audio_file(samples, subtype="PCM_16"))
        assert found.status_code == 200, found.text
        return str(found.json()["text"]).strip()


COUNTED = ("prompt_tokens", "completion_tokens")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=MODELS)
async def world(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    nats_server: Server,
    redis_server: Server,
) -> AsyncIterator[World]:
    directory = tmp_path_factory.mktemp(request.param)
    checkpoint: Path
    if request.param == "whisper":
        checkpoint = whisper(directory)
    elif request.param == "streaming":
        checkpoint = streaming_checkpoint(directory, context=64)
    else:
        checkpoint = asked_checkpoint(directory, request.param)
    bus, redis = bus_settings_of(nats_server), redis_settings_of(redis_server)
    async with SpeechMesh(checkpoint, bus, redis) as mesh:
        yield World(request.param, mesh)


class Client:
    """Reads and writes events as vLLM's examples do."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def next(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(await self.socket.recv())
        return event

    async def start(self, model: str | None = NAME) -> None:
        await self.send("session.update", model=model)
        await self.send(COMMIT)

    async def append(self, samples: Any) -> None:
        data = pcm(samples)
        for start in range(0, len(data), 4096):
            part = base64.b64encode(data[start : start + 4096]).decode()
            await self.send("input_audio_buffer.append", audio=part)

    async def say(self, samples: Any) -> None:
        """Send a whole recording."""
        await self.append(samples)
        await self.send(COMMIT, final=True)

    async def whole(self) -> tuple[list[str], dict[str, Any]]:
        """The deltas until the whole text, and its event."""
        deltas = []
        while (event := await self.next())["type"] == "transcription.delta":
            deltas.append(event["delta"])
        assert event["type"] == "transcription.done", event
        return deltas, event

    async def error(self) -> str:
        event = await self.next()
        assert event["type"] == "error"
        assert isinstance(event["code"], str)
        return str(event["error"])


@asynccontextmanager
async def connected(mesh: SpeechMesh) -> AsyncIterator[Client]:
    url = mesh.url.replace("http", "ws", 1) + "/v1/realtime"
    async with websockets.connect(url) as socket:
        client = Client(socket)
        created = await client.next()
        assert created["type"] == "session.created"
        assert created["id"] == created["session"]["id"]
        assert isinstance(created["created"], int)
        yield client


async def test_the_client_of_files_gets_the_text_of_a_recording(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[Any] = []
    charge = Admission.charge

    def counting(self: Admission, tenant: Any, model: str, usages: list[Any]) -> None:
        charged.extend(usages)
        charge(self, tenant, model, usages)

    first, second = tones(1.7, seed=1), tones(1.1, seed=4)
    expected = [await world.text(each) for each in (first, second)]
    monkeypatch.setattr(Admission, "charge", counting)
    async with connected(world.mesh) as client:
        await client.start()
        for samples, text in zip((first, second), expected, strict=True):
            charged.clear()
            await client.say(samples)
            deltas, done = await client.whole()
            assert deltas
            assert done["text"] == "".join(deltas)
            assert done["text"].strip() == text
            usage = {name: sum(getattr(each, name) for each in charged) for name in COUNTED}
            assert done["usage"] == {**usage, "total_tokens": sum(usage.values())}
            assert usage["completion_tokens"] > 0
        # without audio there is no text, and an answer nevertheless
        await client.send(COMMIT, final=True)
        assert (await client.whole())[1]["text"] == ""


async def test_the_client_of_microphones_gets_text_at_each_pause(world: World) -> None:
    """It never says that the audio has ended."""
    quiet = numpy.zeros(RATE, numpy.float32)
    async with connected(world.mesh) as client:
        await client.start(None)
        text = ""
        for seed in (6, 7):
            await client.append(numpy.concatenate([quiet, tones(1.0, seed=seed), quiet]))
            event = await client.next()
            assert event["type"] == "transcription.delta", event
            text += event["delta"]
        await client.send(COMMIT, final=True)
        deltas, done = await client.whole()
    assert done["text"] == text + "".join(deltas)


async def test_no_audio_of_a_recording_is_left_out(world: World) -> None:
    """Whatever is too quiet to be detected, and whatever comes while something is transcribed."""
    quiet = tones(1.2, seed=3) * 0.002
    samples = numpy.concatenate([quiet, tones(1.0, seed=4), quiet, tones(1.0, seed=5), quiet])
    heard: list[int] = []
    async with connected(world.mesh) as client:
        await client.start()
        before = await seconds(world)
        await client.say(samples)
        await client.whole()
        heard.append(round((await seconds(world) - before) * RATE))
    assert heard == [pytest.approx(len(samples), abs=RATE // 100)]


async def seconds(world: World) -> float:
    """The length of the audio that was transcribed."""
    text = (await world.mesh.client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("tokenmesh:audio_seconds_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def test_bad_events_are_refused_and_the_session_goes_on(world: World) -> None:
    samples = tones(1.0, seed=2)
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("session.update", {"model": "nope"}, "nope"),
        ("input_audio_buffer.append", {"audio": "AAAA"}, "session.update"),
        (COMMIT, {"final": True}, "session.update"),
        ("session.update", {"model": 7}, "model"),
        ("response.create", {}, "is unknown"),
    ]
    later: list[tuple[str, dict[str, Any], str]] = [
        ("input_audio_buffer.append", {"audio": "%%%"}, "not base64"),
        ("input_audio_buffer.append", {"audio": "YWJj"}, "ends within a sample"),
        (COMMIT, {"final": "yes"}, "final"),
        ("session.update", {"model": NAME, "temperature": 1}, "temperature"),
    ]
    async with connected(world.mesh) as client:
        for kind, fields, text in refused:
            await client.send(kind, **fields)
            assert text in await client.error()
        await client.start()
        for kind, fields, text in later:
            await client.send(kind, **fields)
            assert text in await client.error()
        await client.say(samples)
        _, done = await client.whole()
    assert done["text"].strip() == await world.text(samples)


async def test_a_failed_transcript_is_an_error_and_no_whole_text(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, methods = tones(1.0, seed=2), ("whole", "live")

    async def failing(*_: object) -> None:
        raise InvalidInput("it broke")

    async with connected(world.mesh) as client:
        await client.start()
        with monkeypatch.context() as patched:
            for name in methods:
                patched.setattr(ItemTranscripts, name, failing)
            await client.say(samples)
            assert await client.error() == "it broke"
        await client.say(samples)
        _, done = await client.whole()
    assert done["text"].strip() == await world.text(samples)


async def test_a_client_that_leaves_ends_its_transcript(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless(*_: object) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    for name in ("whole", "live"):
        monkeypatch.setattr(ItemTranscripts, name, endless)
    async with connected(world.mesh) as client:
        await client.start()
        await client.say(tones(1.0, seed=2))
        await asyncio.wait_for(begun.wait(), 20)
        assert not ended.is_set()
    await asyncio.wait_for(ended.wait(), 20)


async def test_sessions_of_openai_hold_nothing_of_vllm(world: World) -> None:
    url = world.mesh.url.replace("http", "ws", 1) + "/v1/realtime"
    for query in (f"model={NAME}", "intent=transcription"):
        async with websockets.connect(f"{url}?{query}") as socket:
            client = Client(socket)
            assert (await client.next()).keys() == {"type", "event_id", "session"}
            await client.send("session.update", session={"type": "transcription"})
            assert (await client.next())["type"] == "session.updated"
            await client.send("session.update", model=NAME)
            assert (await client.next())["error"]["param"] in ("model", "session")
