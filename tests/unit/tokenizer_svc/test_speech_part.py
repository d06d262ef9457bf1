"""Parts of speech that goes on hold what the spectrogram of the whole of it holds."""

import json
from pathlib import Path

import numpy
import pytest
import soxr

from tests.fakes.recordings import tones
from tokenmesh.services.tokenizer_svc.media.audio_child import AudioJob, part_of
from tokenmesh.services.tokenizer_svc.media.audio_file import AudioLimits
from tokenmesh.services.tokenizer_svc.media.speech_part import PartFeatures, SpeechPart
from tokenmesh.services.tokenizer_svc.media.stream_features import StreamFeatures
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge

CONFIG = {"default_num_delay_tokens": 3, "text_config": {"max_position_embeddings": 1024}}
LIMITS = AudioLimits(max_s=10.0)


def features(directory: Path, before: int = 5, **extractor: object) -> StreamFeatures:
    """The preprocessing of a checkpoint of Voxtral Realtime."""
    settings = {"feature_size": 16, **extractor}
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    audio = {"streaming_n_left_pad_tokens": before}
    (directory / "tekken.json").write_text(json.dumps({"audio": audio}))
    return StreamFeatures(directory, CONFIG)


def in_parts(
    extract: StreamFeatures, samples: numpy.ndarray, rate: int, sizes: list[int]
) -> numpy.ndarray:
    """The spectrogram of speech of which so many more samples are known each time."""
    make, found = PartFeatures(extract, rate), list[numpy.ndarray]()
    known = first = token = 0
    while known < len(samples):
        known = min(len(samples), known + sizes[len(found) % len(sizes)])
        part = SpeechPart(first, token, "", known == len(samples))
        made, first = make(samples[first:known], part)
        token += made.shape[1] // extract.frames_of_token
        found.append(made)
    return numpy.concatenate([each for each in found if each.size], axis=1)


@pytest.mark.parametrize("before", [5, 0])
@pytest.mark.parametrize("sizes", [[7680], [100, 5000, 1281], [30_000]])
def test_parts_hold_what_the_whole_holds(tmp_path: Path, before: int, sizes: list[int]) -> None:
    extract = features(tmp_path, before)
    for seconds in (2.36, 0.02):
        samples = tones(seconds, seed=2)
        parts = in_parts(extract, samples, extract.rate, sizes)
        numpy.testing.assert_array_equal(parts, extract(samples))


@pytest.mark.parametrize("rate", [8000, 22_050, 24_000, 44_100, 48_000])
def test_parts_of_another_rate_are_those_of_the_whole_resampled(tmp_path: Path, rate: int) -> None:
    extract = features(tmp_path)
    samples = tones(2.36, rate=rate, seed=3)
    whole = extract(numpy.asarray(soxr.resample(samples, rate, extract.rate), numpy.float32))
    parts = in_parts(extract, samples, rate, [rate // 2, 101])
    assert parts.shape == whole.shape
    numpy.testing.assert_allclose(parts, whole, atol=1e-3)


def test_a_token_is_there_as_soon_as_its_last_frame_is(tmp_path: Path) -> None:
    make = PartFeatures(features(tmp_path), 16_000)
    part = SpeechPart(0, 0, "", False)
    # the last frame of a token reaches 40 samples into the next one
    found = [make(tones(1.0)[:size], part)[0].shape[1] // 8 for size in (1319, 1320, 2599, 2600)]
    assert found == [5, 6, 6, 7]


def test_identity_depends_on_all_parts_before(tmp_path: Path) -> None:
    extract = features(tmp_path)
    data = (tones(1.0) * 32767).astype("<i2").tobytes()

    def clip(follows: str) -> str:
        part = SpeechPart(0, 0, follows, True)
        (found,) = part_of(AudioJob(data, 0, 1, 16_000), part, extract, LIMITS).clips
        assert found.num_tokens == 5 + 13 + 14
        return found.content_hash

    assert clip("a") == clip("a") != clip("b")


def test_parts_that_cannot_be_are_refused(tmp_path: Path) -> None:
    extract = features(tmp_path)
    job = AudioJob(bytes(3200), 0, 1, 24_000)
    for part, why in (
        (SpeechPart(1, 0, "", False), "not one that was returned"),
        (SpeechPart(48_000, 3, "", False), "lies after the part"),
    ):
        with pytest.raises(InvalidInput, match=why):
            part_of(job, part, extract, LIMITS)
    with pytest.raises(InvalidInput, match="sample rate 3000000"):
        part_of(
            AudioJob(bytes(3200), 0, 1, 3_000_000), SpeechPart(0, 0, "", False), extract, LIMITS
        )
    with pytest.raises(PayloadTooLarge, match="longer than 10 s"):
        part_of(
            AudioJob(bytes(400_000), 0, 1, 16_000), SpeechPart(0, 0, "", False), extract, LIMITS
        )
    loudest = features(tmp_path, global_log_mel_max=None)
    with pytest.raises(InvalidInput, match="need a whole recording"):
        PartFeatures(loudest, 16_000)
