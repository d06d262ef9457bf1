"""Audio files to samples: which containers and codecs are read, and within which bounds.

libsndfile reads WAV, AIFF, FLAC, Ogg and MP3; FFmpeg, where PyAV is installed, MP4 and WebM. A file
is given only to the reader of the container that its first bytes name. What it holds is read,
whatever length its header declares.
"""

import io
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

import msgspec
import numpy
import numpy.typing as npt
import soundfile
import soxr

from tokenmesh.services.tokenizer_svc.media.audio_length import (
    aiff_with_true_length,
    mp3_parts,
    ogg_links,
    wav_with_true_length,
)
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge

if TYPE_CHECKING:
    import av.container

Samples = npt.NDArray[numpy.float32]
"""Mono, [-1, 1] in most files."""

NAMES: Final = "WAV, AIFF, FLAC, Ogg (Opus or Vorbis), MP3, MP4 (m4a) and WebM"
_MAX_CHANNELS: Final = 8
_MIN_RATE: Final = 4_000
_MAX_RATE: Final = 192_000
_BLOCK_FRAMES: Final = 1 << 16
_SNDFILE_FORMATS: Final = {
    "wav": ("WAV", "WAVEX"),
    "aiff": ("AIFF",),
    "flac": ("FLAC",),
    "ogg": ("OGG",),
    "mp3": ("MP3",),
}
_SUBTYPES: Final = frozenset(
    {
        *("PCM_U8", "PCM_S8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"),
        *("VORBIS", "OPUS", "MPEG_LAYER_III"),
    }
)
_AV_FORMATS: Final = {"mp4": "mov", "webm": "matroska"}
_AV_CODECS: Final = frozenset(
    {"aac", "alac", "mp3", "mp3float", "opus", "libopus", "vorbis", "flac"}
)
_PARTS_OF: Final[dict[str, Callable[[bytes], list[bytes]]]] = {
    "wav": lambda data: [wav_with_true_length(data)],
    "aiff": lambda data: [aiff_with_true_length(data)],
    "mp3": mp3_parts,
    "ogg": ogg_links,
}
"""By container: the files that libsndfile gets in place of a file, one after the other."""
_UNKNOWN_FRAMES: Final = (1 << 63) - 1
"""libsndfile says this of a FLAC file that was written as a stream."""
_LOUDEST: Final = 1e6
"""Samples are from -1 to 1, in files of floats a little more; much larger ones are damage."""


class AudioLimits(msgspec.Struct, frozen=True):
    """Bounds of one file."""

    max_s: float


def container_of(data: bytes) -> str | None:
    """The container that the first bytes name; None: no known one."""
    if data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE":
        return "wav"
    if data[:4] == b"FORM" and data[8:12] in (b"AIFF", b"AIFC"):
        return "aiff"
    if data[:4] == b"fLaC":
        return "flac"
    if data[:4] == b"OggS":
        return "ogg"
    if data[:3] == b"ID3" or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2):
        return "mp3"
    if data[4:8] == b"ftyp":
        return "mp4"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "webm"
    return None


def decode_audio(data: bytes, rate: int, limits: AudioLimits) -> Samples:
    """All samples, mono, at `rate` a second. Raises InvalidInput or PayloadTooLarge."""
    container = container_of(data)
    if container is None:
        raise InvalidInput(f"the file is not audio of a known format ({NAMES})")
    try:
        if container in _AV_FORMATS:
            return _joined(_read_with_ffmpeg(data, container, limits), rate, limits)
        parts = _PARTS_OF[container](data) if container in _PARTS_OF else [data]
        blocks = (block for part in parts for block in _read_with_sndfile(part, container, limits))
        return _joined(blocks, rate, limits)
    except soundfile.LibsndfileError as error:
        # its text begins with the object that was read
        raise InvalidInput(f"the {container} file is damaged: {error.error_string}") from error
    except (RuntimeError, ValueError, OSError, struct.error) as error:
        raise InvalidInput(f"the {container} file is damaged: {error}") from error


@dataclass(frozen=True, slots=True)
class _Block:
    samples: Samples
    rate: int


def _read_with_sndfile(data: bytes, container: str, limits: AudioLimits) -> Iterator[_Block]:
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        # Else soundfile seeks after each read, which fails at the end of a FLAC file of unknown
        # length.
        file.seekable = lambda: False
        if file.format not in _SNDFILE_FORMATS[container] or file.subtype not in _SUBTYPES:
            raise InvalidInput(
                f"the codec {file.subtype} in {file.format} is not supported; supported are {NAMES}"
            )
        check_shape(file.samplerate, file.channels)
        declared = 0 if file.frames == _UNKNOWN_FRAMES else file.frames
        _check_length(declared / file.samplerate, limits)
        num_read = 0
        while True:
            frames = file.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)
            if not len(frames):
                break
            num_read += len(frames)
            yield _Block(frames.mean(axis=1), file.samplerate)
        # Its encoder writes the length when all samples are written, unlike that of a WAV file.
        if container == "flac" and num_read < declared:
            raise InvalidInput(
                f"the flac file is cut off: it declares {declared} samples and holds {num_read}"
            )


def _read_with_ffmpeg(data: bytes, container: str, limits: AudioLimits) -> Iterator[_Block]:
    try:
        import av
    except ImportError as error:
        raise InvalidInput(
            f"{container} files are not read by this server: it lacks PyAV, which "
            "tokenmesh-server[media] installs; send WAV, FLAC, Ogg or MP3"
        ) from error
    try:
        # tags in another encoding than UTF-8 are not read
        with av.open(
            io.BytesIO(data), "r", format=_AV_FORMATS[container], metadata_errors="replace"
        ) as file:
            yield from _frames_of(file, limits)
    except av.FFmpegError as error:
        raise InvalidInput(f"the {container} file is damaged: {error.strerror}") from error


def _frames_of(file: "av.container.InputContainer", limits: AudioLimits) -> Iterator[_Block]:
    import av

    if not file.streams.audio:
        raise InvalidInput("the file holds no audio")
    stream = file.streams.audio[0]
    codec = stream.codec_context
    # PyAV's types do not say that it is None for a codec that FFmpeg does not know
    if getattr(codec, "name", None) is None:
        raise InvalidInput(f"the codec is not known; supported are {NAMES}")
    if codec.name not in _AV_CODECS:
        raise InvalidInput(f"the codec {codec.name} is not supported; supported are {NAMES}")
    codec.thread_count = 1  # a confined process starts no threads
    check_shape(codec.sample_rate, codec.channels)
    if stream.duration is not None and stream.time_base is not None:
        _check_length(float(stream.duration * stream.time_base), limits)
    rate = codec.sample_rate
    planes = av.AudioResampler(format="fltp", rate=rate)
    for frame in file.decode(stream):
        check_shape(frame.sample_rate, frame.layout.nb_channels)
        for each in planes.resample(frame):
            yield _Block(each.to_ndarray().mean(axis=0, dtype=numpy.float32), rate)


def _joined(blocks: Iterator[_Block], rate: int, limits: AudioLimits) -> Samples:
    """At `rate`, all of it. Memory grows with what was decoded, at most `max_s`."""
    checked = _checked(blocks, limits)
    parts = [
        part
        for given, group in groupby(checked, lambda block: block.rate)
        for part in _resampled(group, given, rate)
    ]
    samples = numpy.concatenate(parts) if parts else numpy.zeros(0, numpy.float32)
    if not len(samples):
        raise InvalidInput("the file holds no audio")
    return samples


def _checked(blocks: Iterator[_Block], limits: AudioLimits) -> Iterator[_Block]:
    seconds = 0.0
    for block in blocks:
        seconds += len(block.samples) / block.rate
        _check_length(seconds, limits)
        if not numpy.abs(block.samples).max(initial=0.0) < _LOUDEST:
            raise InvalidInput("the file holds samples that are not finite, or far out of range")
        yield block


def _resampled(blocks: Iterator[_Block], given: int, rate: int) -> Iterator[Samples]:
    if given == rate:
        yield from (block.samples for block in blocks)
        return
    resampler = soxr.ResampleStream(given, rate, 1, dtype="float32")
    for block in blocks:
        yield resampler.resample_chunk(block.samples)
    yield resampler.resample_chunk(numpy.zeros(0, numpy.float32), last=True)


def check_shape(rate: int, channels: int) -> None:
    """Raise InvalidInput for a rate or a number of channels that is not read."""
    if not _MIN_RATE <= rate <= _MAX_RATE:
        raise InvalidInput(
            f"the sample rate {rate} is not supported: it must be {_MIN_RATE} to {_MAX_RATE}"
        )
    if not 1 <= channels <= _MAX_CHANNELS:
        raise InvalidInput(f"the file has {channels} channels, at most {_MAX_CHANNELS}")


def _check_length(seconds: float, limits: AudioLimits) -> None:
    if seconds > limits.max_s:
        raise PayloadTooLarge(
            f"the audio is {seconds:.0f} s long or longer, at most {limits.max_s:g} s "
            "(tokenizer.media.max_audio_s)"
        )
