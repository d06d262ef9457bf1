"""The process that reads audio: files from stdin, features of clips to stdout, until stdin ends.

`python -m ...audio_child <seconds> <bytes of memory> <seconds of audio> <checkpoint>
<seconds of a clip>`. The kernel
enforces its limits for any file, as in `jobs`.
"""

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy

from tokenmesh.services.tokenizer_svc.loading import forbid_torch
from tokenmesh.services.tokenizer_svc.media.audio_cuts import cut_points
from tokenmesh.services.tokenizer_svc.media.audio_file import (
    AudioLimits,
    Samples,
    check_shape,
    decode_audio,
)
from tokenmesh.services.tokenizer_svc.media.confine import confine
from tokenmesh.services.tokenizer_svc.media.features import RecordingFeatures, load_clip_features
from tokenmesh.services.tokenizer_svc.media.speech_part import PartFeatures, SpeechPart
from tokenmesh.services.tokenizer_svc.media.stream_features import StreamFeatures
from tokenmesh.shared.child_pool import serve
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge
from tokenmesh.shared.tensor_blob import TensorBlob, encode_named

DONE: Final = b"d"
INVALID: Final = b"i"
TOO_LARGE: Final = b"l"
"""First byte of an answer; a Clips follows the first, a text the others."""


class AudioJob(msgspec.Struct, frozen=True):
    """A file and which of its clips are wanted."""

    data: bytes
    first: int
    count: int
    rate: int = 0
    """The rate of raw samples, 16-bit little-endian mono; 0: `data` is a file."""
    part: SpeechPart | None = None
    """The part of speech that goes on, in place of clips."""


class Clip(msgspec.Struct, frozen=True):
    start_s: float
    end_s: float
    content_hash: str
    """The hash of the samples and the extractor's options."""
    features: bytes
    """A blob of named tensors: `input_features` [1, bins, frames], or those of a recording in a
    prompt."""
    num_tokens: int = 0
    """See `AudioClip.num_tokens`."""


class Clips(msgspec.Struct, frozen=True):
    duration_s: float
    total: int
    """Clips of the whole file."""
    clips: list[Clip]
    """None of speech that does not fill one more token."""
    next_sample: int = 0
    """The first sample that the next part needs, in speech that goes on."""


class AudioFeatures(Protocol):
    """A checkpoint's preprocessing of one clip."""

    rate: int
    """Samples a second."""
    window_s: float
    """Longest clip."""
    options: bytes
    """All options that change its result."""
    frames_of_token: int
    """0: clips are not added to tokens."""

    def __call__(self, samples: Samples) -> Any:
        """Features of the samples of a clip: float32 [bins, frames]."""


Extract = AudioFeatures | RecordingFeatures


def clips_of(job: AudioJob, extract: Extract, limits: AudioLimits) -> Clips:
    """Raises InvalidInput or PayloadTooLarge."""
    rate = extract.rate
    samples = _samples_of(job, rate, limits)
    cuts = cut_points(samples, rate, extract.window_s)
    clips = []
    for start, end in cuts[job.first : job.first + job.count]:
        part = samples[start:end]
        if isinstance(extract, RecordingFeatures):
            features, num_tokens = extract(part)
            content_hash = _hash(extract.options, part.tobytes())
            found = Clip(start / rate, end / rate, content_hash, features, num_tokens)
        else:
            found = _clip(extract, extract(part), part.tobytes(), start / rate, end / rate)
        clips.append(found)
    return Clips(len(samples) / rate, len(cuts), clips)


def part_of(job: AudioJob, part: SpeechPart, extract: Extract, limits: AudioLimits) -> Clips:
    """Raises InvalidInput or PayloadTooLarge."""
    if not isinstance(extract, StreamFeatures):
        raise InvalidInput("the model does not transcribe speech that goes on", param="model")
    check_shape(job.rate, channels=1)
    samples = _samples_of(job, job.rate, limits)
    make = PartFeatures(extract, job.rate)
    features, next_sample = make(samples, part)
    seconds = (part.first_sample + len(samples)) / job.rate
    if not features.size:
        return Clips(seconds, 1, [], next_sample)
    end_token = part.first_token + features.shape[1] // extract.frames_of_token
    end_s = seconds if part.is_end else make.seconds(end_token)
    identity = part.follows.encode() + features.tobytes()
    clip = _clip(extract, features, identity, make.seconds(part.first_token), end_s)
    return Clips(seconds, 1, [clip], next_sample)


def _clip(
    extract: AudioFeatures, features: Any, identity: bytes, start_s: float, end_s: float
) -> Clip:
    """identity: bytes that, with the extractor's options, say what the clip is."""
    features = numpy.ascontiguousarray(features, dtype="<f4")[None]
    named = {"input_features": TensorBlob("float32", features.shape, features.tobytes())}
    frames = extract.frames_of_token
    num_tokens = features.shape[-1] // frames if frames else 0
    content_hash = _hash(extract.options, identity)
    return Clip(start_s, end_s, content_hash, encode_named(named), num_tokens)


def _hash(options: bytes, identity: bytes) -> str:
    digest = hashlib.sha256(len(options).to_bytes(8, "little"))
    digest.update(options)
    digest.update(identity)
    return digest.hexdigest()


def _samples_of(job: AudioJob, rate: int, limits: AudioLimits) -> Samples:
    if not job.rate:
        return decode_audio(job.data, rate, limits)
    import soxr

    raw = numpy.frombuffer(job.data[: len(job.data) // 2 * 2], "<i2")
    if not len(raw):
        raise InvalidInput("the audio holds no samples")
    if len(raw) / job.rate > limits.max_s:
        raise PayloadTooLarge(
            f"the audio is longer than {limits.max_s:g} s (tokenizer.media.max_audio_s)"
        )
    samples: Samples = raw.astype(numpy.float32)
    samples /= 32768
    if job.rate == rate:
        return samples
    return numpy.asarray(soxr.resample(samples, job.rate, rate), dtype=numpy.float32)


def answer(data: bytes, extract: Extract, limits: AudioLimits) -> bytes:
    """Execute one job; every failure is an answer."""
    try:
        job = msgspec.msgpack.decode(data, type=AudioJob)
        if job.part is None:
            found = clips_of(job, extract, limits)
        else:
            found = part_of(job, job.part, extract, limits)
        return DONE + msgspec.msgpack.encode(found)
    except PayloadTooLarge as error:
        return TOO_LARGE + error.message.encode()
    except InvalidInput as error:
        return INVALID + error.message.encode()
    except msgspec.DecodeError:
        return INVALID + b"the job cannot be read"
    except MemoryError:
        return TOO_LARGE + b"the audio needs more memory than decoding may use"


def load_codecs(rate: int, read: Callable[[bytes], object]) -> None:
    """Import what is loaded lazily, by reading a file of each format: later none can be opened."""
    import io

    import soundfile

    silence = numpy.zeros(rate // 4, numpy.float32)
    for kind in ("WAV", "FLAC", "OGG", "MP3"):
        file = io.BytesIO()
        soundfile.write(file, silence, rate, format=kind)
        read(file.getvalue())
    try:
        import av
    except ImportError:
        return
    with av.open(io.BytesIO(), "w", format="mp4") as container:
        container.add_stream("aac", rate=rate)


def main(time_s: float, memory_bytes: int, max_s: float, checkpoint: Path, window_s: float) -> None:
    """Serve until stdin ends."""
    forbid_torch()
    extract, limits = load_clip_features(checkpoint, window_s), AudioLimits(max_s)

    def read(data: bytes) -> bytes:
        return answer(msgspec.msgpack.encode(AudioJob(data, 0, 1)), extract, limits)

    load_codecs(extract.rate, read)
    confine(memory_bytes)

    def prepare(data: bytes) -> Callable[[], bytes]:
        return lambda: answer(data, extract, limits)

    serve(sys.stdin.buffer, sys.stdout.buffer, time_s, prepare)


if __name__ == "__main__":
    main(
        float(sys.argv[1]),
        int(sys.argv[2]),
        float(sys.argv[3]),
        Path(sys.argv[4]),
        float(sys.argv[5]),
    )
