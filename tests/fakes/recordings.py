"""Synthetic recordings in the formats that clients send."""

import io
from typing import Any, Final

import numpy
import numpy.typing as npt
import soundfile

RATE: Final = 16000


def tones(seconds: float, rate: int = RATE, seed: int = 0) -> npt.NDArray[numpy.float32]:
    """A chord that swells and fades several times a second."""
    time_s = numpy.arange(int(seconds * rate)) / rate
    pitches = 150.0 + 40.0 * numpy.random.default_rng(seed).random(3)
    chord = sum(
        numpy.sin(2 * numpy.pi * pitch * (n + 1) * time_s) / (n + 1)
        for n, pitch in enumerate(pitches)
    )
    swell = 0.6 + 0.4 * numpy.sin(2 * numpy.pi * 3 * time_s + seed)
    return numpy.asarray(0.15 * chord * swell, dtype=numpy.float32)


def syllables(words: int, rate: int = RATE, seed: int = 0) -> npt.NDArray[numpy.float32]:
    """Make sounds like words of a voice: pulses through two resonances, with short pauses."""
    draw = numpy.random.default_rng(seed)
    pause = numpy.zeros(rate // 12, numpy.float32)
    parts = [pause]
    for _ in range(words):
        parts += [_syllable(draw, rate) for _ in range(draw.integers(1, 4))]
        parts.append(pause)
    return numpy.concatenate(parts)


def _syllable(draw: numpy.random.Generator, rate: int) -> npt.NDArray[numpy.float32]:
    count = int(rate * draw.uniform(0.12, 0.22))
    time_s = numpy.arange(count) / rate
    pitch = draw.uniform(90, 220) * (1 - 0.3 * time_s)
    formants = draw.uniform(300, 800), draw.uniform(900, 2500)
    phase = 2 * numpy.pi * numpy.cumsum(pitch) / rate
    sound = numpy.zeros(count)
    for harmonic in range(1, 16):
        distances = [abs(harmonic * pitch.mean() - formant) for formant in formants]
        sound += sum(numpy.exp(-each / 150) for each in distances) * numpy.sin(harmonic * phase)
    swell = numpy.sin(numpy.pi * numpy.arange(count) / count) ** 0.5
    return numpy.asarray(0.25 * swell * sound / numpy.abs(sound).max(), numpy.float32)


def audio_file(
    samples: npt.NDArray[numpy.float32], kind: str = "WAV", rate: int = RATE, **options: Any
) -> bytes:
    """samples [n] or [n, channels]; kind: soundfile's name, OPUS, m4a or webm."""
    if kind in ("m4a", "webm"):
        return _with_ffmpeg(samples, kind, rate)
    file = io.BytesIO()
    if kind == "OPUS":
        kind, options = "OGG", {"subtype": "OPUS"}
    soundfile.write(file, samples, rate, format=kind, **options)
    return file.getvalue()


def _with_ffmpeg(samples: npt.NDArray[numpy.float32], kind: str, rate: int) -> bytes:
    file = io.BytesIO()
    _write(file, samples, {"m4a": "mp4"}.get(kind, kind), {"m4a": "aac"}.get(kind, "libopus"), rate)
    return file.getvalue()


class _Pipe:
    """Takes bytes, and cannot go back to those before."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> int:
        self.data += bytes(data)
        return len(data)


def streamed_file(
    samples: npt.NDArray[numpy.float32], kind: str, codec: str, rate: int, options: dict[str, str]
) -> bytes:
    """Write as FFmpeg writes into a pipe: its headers cannot know the length."""
    pipe = _Pipe()
    _write(pipe, samples, kind, codec, rate, options)
    return pipe.data


def _write(
    file: Any,
    samples: npt.NDArray[numpy.float32],
    kind: str,
    codec: str,
    rate: int,
    options: dict[str, str] | None = None,
) -> None:
    import av

    with av.open(file, "w", format=kind, options=options or {}) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = rate
        size = stream.codec_context.frame_size or None
        resampler = av.AudioResampler(stream.format, "mono", rate, size)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
