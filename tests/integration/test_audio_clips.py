"""Recordings in the blob store become clips with features, in processes that bound them."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import pytest_asyncio
from transformers import WhisperFeatureExtractor

from tests.fakes.recordings import RATE, audio_file, tones
from tests.fakes.service_mesh import running
from tests.fakes.whisper import CLIP_S, LANGUAGES, STATES, SUPPRESSED, whisper
from tests.servers import Server, bus_settings_of, redis_settings_of
from tokenmesh.services.tokenizer_svc.main import build
from tokenmesh.shared import subjects, tensor_blob
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.model import MediaSettings, ModelSettings, TokenizerSettings
from tokenmesh.shared.errors import InvalidInput, NotFound, PayloadTooLarge, ProtocolError
from tokenmesh.shared.ids import BlobKey, ModelName, RequestId
from tokenmesh.shared.messages import AudioPrepared, Describe, Described, PrepareAudio

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]
MODEL = ModelName("whisper-clips")
SOURCE = BlobKey("recording")


@dataclass
class Client:
    """Sends recordings to the running tokenizer."""

    bus: Bus
    blobs: Blobs

    async def prepare(
        self, data: bytes, *, rate: int = 0, first: int = 0, count: int = 1
    ) -> AudioPrepared:
        await self.blobs.put(data, key=SOURCE)
        message = PrepareAudio(
            request_id=RequestId("r"),
            model=MODEL,
            source=SOURCE,
            rate=rate,
            first=first,
            count=count,
        )
        answer = await self.bus.request(subjects.tokenize(MODEL), message, deadline_s=now_s() + 15)
        assert isinstance(answer, AudioPrepared)
        return answer

    async def features(self, key: BlobKey) -> numpy.ndarray:
        blob = tensor_blob.decode_named(await self.blobs.get(key))["input_features"]
        return numpy.frombuffer(blob.data, "<f4").reshape(blob.shape)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper(tmp_path_factory.mktemp("whisper"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(
    checkpoint: Path, nats_server: Server, redis_server: Server
) -> AsyncIterator[Client]:
    media = MediaSettings(max_audio_s=60.0, max_audio_bytes=4_000_000, decode_processes=1)
    model = ModelSettings(model=str(checkpoint), served_model_name=(MODEL,))
    settings = Settings(
        models=(model,),
        tokenizer=TokenizerSettings(media=media),
        bus=bus_settings_of(nats_server),
        redis=redis_settings_of(redis_server),
    )
    async with running("tokenizer", settings, build) as mesh:
        yield Client(mesh.bus, mesh.blobs)


async def test_clips_have_the_features_of_transformers(client: Client, checkpoint: Path) -> None:
    extract = WhisperFeatureExtractor.from_pretrained(checkpoint)
    sound = tones(9.0)
    prepared = await client.prepare(audio_file(sound, "WAV", subtype="FLOAT"), count=2)
    assert prepared.duration_s == pytest.approx(9.0)
    assert prepared.total == 3
    first, second = prepared.clips
    assert (first.start_s, first.end_s) == (0.0, second.start_s)
    assert 3.3 < first.end_s <= CLIP_S
    for clip in prepared.clips:
        part = sound[round(clip.start_s * RATE) : round(clip.end_s * RATE)]
        wanted = extract(part, sampling_rate=RATE, return_tensors="np").input_features[0]
        ours = await client.features(clip.features)
        assert ours.shape == (1, 16, 2 * STATES)
        assert numpy.abs(ours[0] - wanted).max() < 2e-3
    # the rest has the same cuts
    rest = await client.prepare(audio_file(sound, "WAV", subtype="FLOAT"), first=2, count=8)
    assert [clip.start_s for clip in rest.clips] == [second.end_s]
    assert rest.clips[0].end_s == pytest.approx(9.0)
    # raw samples of 16 bits, at another rate
    raw = (tones(1.0, rate=24000) * 32767).astype("<i2").tobytes()
    (clip,) = (await client.prepare(raw, rate=24000)).clips
    assert clip.end_s == pytest.approx(1.0, abs=0.01)
    same = await client.prepare(audio_file(sound, "WAV", subtype="FLOAT"))
    assert same.clips[0].content_hash == first.content_hash


async def test_bad_recordings_are_refused_and_the_next_one_is_read(client: Client) -> None:
    silence = audio_file(numpy.zeros(8000 * 90, numpy.float32), "FLAC", rate=8000)
    cases: list[tuple[bytes, type[Exception], str]] = [
        (b"not audio at all", InvalidInput, "known format"),
        (audio_file(tones(1.0))[:40], InvalidInput, "holds no samples"),
        (silence, PayloadTooLarge, "at most 60 s"),
        (bytes(5_000_000), PayloadTooLarge, "5000000 bytes"),
    ]
    for data, error, text in cases:
        with pytest.raises(error, match=text):
            await client.prepare(data)
    with pytest.raises(PayloadTooLarge, match="longer than 60 s"):
        await client.prepare(bytes(16000 * 2 * 61), rate=16000)
    for fields in ({"first": -1}, {"count": 0}, {"count": 1000}, {"rate": -5}):
        with pytest.raises(ProtocolError):
            await client.prepare(b"x", **fields)
    for kind in ("FLAC", "OGG", "MP3", "m4a"):
        assert (await client.prepare(audio_file(tones(0.5), kind))).total == 1
    message = PrepareAudio(request_id=RequestId("r"), model=MODEL, source=BlobKey("none"))
    with pytest.raises(NotFound):
        await client.bus.request(subjects.tokenize(MODEL), message, deadline_s=now_s() + 5)


async def test_the_model_says_how_it_is_prompted(client: Client) -> None:
    described = await client.bus.request(
        subjects.tokenize(MODEL), Describe(model=MODEL), deadline_s=now_s() + 5
    )
    assert isinstance(described, Described)
    facts = described.speech
    assert facts is not None
    assert facts.start_id == facts.end_id + 1 == 301
    assert facts.languages == {name: 302 + n for n, name in enumerate(LANGUAGES)}
    assert (facts.translate_id, facts.transcribe_id) == (306, 307)
    assert (facts.previous_id, facts.no_speech_id) == (309, 310)
    assert (facts.no_timestamps_id, facts.first_timestamp_id) == (311, 312)
    assert facts.num_timestamps == STATES + 1
    assert facts.timestamp_s == pytest.approx(0.02)
    assert tuple(facts.suppress_ids) == SUPPRESSED
    assert facts.window_s == CLIP_S
