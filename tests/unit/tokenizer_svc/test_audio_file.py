"""Audio files are read, or refused with a reason."""

import io
import struct
import time

import numpy
import pytest
import soundfile

from tests.fakes.bombs import flac_declaring
from tests.fakes.recordings import RATE, audio_file, tones
from tokenmesh.services.tokenizer_svc.media.audio_cuts import cut_points
from tokenmesh.services.tokenizer_svc.media.audio_file import (
    AudioLimits,
    container_of,
    decode_audio,
)
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge

LIMITS = AudioLimits(max_s=60.0)
LITTLE_S = 5.0
"""CPU time that is enough for a slow machine, and too little for work that grows with a false
length."""


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        *(("WAV", 1e-4), ("FLAC", 1e-4), ("OGG", 0.1), ("OPUS", 0.2), ("MP3", 0.1)),
        *(("m4a", 0.2), ("webm", 0.2)),
    ],
)
def test_every_format_gives_the_same_sound(kind: str, error: float) -> None:
    sound = tones(1.5)
    data = audio_file(sound, kind)
    samples = decode_audio(data, RATE, LIMITS)
    assert samples.dtype == numpy.float32
    # codecs pad: 0.1 s at most
    assert abs(len(samples) - len(sound)) <= RATE // 10
    ours, theirs = numpy.abs(numpy.fft.rfft(samples)), numpy.abs(numpy.fft.rfft(sound))
    loudest = numpy.argmax(ours) / len(samples), numpy.argmax(theirs) / len(sound)
    assert loudest[0] == pytest.approx(loudest[1], abs=1e-3)
    power = float(numpy.square(samples).mean()) / float(numpy.square(sound).mean())
    assert power == pytest.approx(1.0, abs=error + 0.1)


def test_channels_are_averaged_and_rates_converted() -> None:
    left = tones(1.0, rate=44100)
    data = audio_file(numpy.stack([left, -left], axis=1), "WAV", rate=44100)
    assert numpy.abs(decode_audio(data, RATE, LIMITS)).max() < 1e-3
    mono = decode_audio(audio_file(left, "WAV", rate=44100), RATE, LIMITS)
    assert abs(len(mono) - RATE) < 50
    assert numpy.abs(mono[200:-200] - tones(1.0)[200 : len(mono) - 200]).max() < 5e-3


def wav_header(data_bytes: int, rate: int = RATE, channels: int = 1) -> bytes:
    width = 2 * channels
    return b"RIFF" + struct.pack(
        "<I4s4sIHHIIHH4sI",
        (36 + data_bytes) & 0xFFFFFFFF,
        *(b"WAVE", b"fmt ", 16, 1, channels, rate, (rate * width) & 0xFFFFFFFF, width, 16),
        *(b"data", data_bytes),
    )


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "known format"),
        (b"hello world, I am text", "known format"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "known format"),
        (wav_header(3200, rate=0) + bytes(3200), "wav"),
        (wav_header(3200, rate=1_000_000) + bytes(3200), "sample rate 1000000"),
        (wav_header(3200, rate=4_000_000_000) + bytes(3200), "wav"),
        (wav_header(3200, channels=2**15 - 1) + bytes(3200), "wav"),
        (wav_header(3200, channels=64) + bytes(3200), "64 channels"),
        (wav_header(0), "no audio"),
        (b"RIFF\0\0\0\0WAVE" + b"junk" * 5, "wav"),
        (b"fLaC" + bytes(300), "flac"),
        (b"OggS" + bytes(300), "ogg"),
        (b"ID3" + bytes(300), "mp3"),
        (b"\xff\xfb\x90\x64" + b"junk" * 200, "mp3"),
        (b"OggS" + b"junk" * 200, "ogg"),
        (b"\0\0\0\x20ftypM4A " + bytes(300), "mp4"),
        (b"\x1a\x45\xdf\xa3" + bytes(300), "webm"),
    ],
)
def test_bad_files_are_refused_by_name(data: bytes, text: str) -> None:
    with pytest.raises(InvalidInput, match=text) as caught:
        decode_audio(data, RATE, LIMITS)
    for shown in ("<", "0x", "BytesIO", "object"):
        assert shown not in caught.value.message


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "OPUS", "MP3", "m4a", "webm"])
def test_an_error_about_flipped_bytes_tells_nothing_of_this_process(kind: str) -> None:
    data = audio_file(tones(0.2), kind)
    messages = []
    for place in range(0, min(len(data), 400), 13):
        broken = bytearray(data)
        broken[place] ^= 0xFF
        try:
            decode_audio(bytes(broken), RATE, LIMITS)
        except InvalidInput as error:
            messages.append(error.message)
    assert messages
    for shown in ("<", "0x", "BytesIO", "object"):
        assert shown not in "".join(messages)


def test_an_endless_or_broken_signal_is_refused() -> None:
    values = tones(0.5)
    values[100] = numpy.nan
    with pytest.raises(InvalidInput, match="finite"):
        decode_audio(audio_file(values, "WAV", subtype="FLOAT"), RATE, LIMITS)


@pytest.mark.parametrize("kind", ["FLAC", "OGG", "MP3"])
def test_truncated_files_are_refused_or_short(kind: str) -> None:
    data = audio_file(tones(3.0), kind)
    try:
        samples = decode_audio(data[: len(data) // 2], RATE, LIMITS)
    except InvalidInput:
        return
    assert kind != "FLAC"
    assert len(samples) < 2.5 * RATE


@pytest.mark.parametrize("kind", ["FLAC", "OPUS"])
def test_long_silence_is_refused_before_it_is_decoded(kind: str) -> None:
    file = io.BytesIO()
    subtype = {"subtype": "OPUS"} if kind == "OPUS" else {}
    container = "OGG" if kind == "OPUS" else kind
    rate, minutes = (8000, 2) if kind == "OPUS" else (8000, 30)
    with soundfile.SoundFile(file, "w", rate, 1, format=container, **subtype) as out:
        silence = numpy.zeros(rate * 60, numpy.float32)
        for _ in range(minutes):
            out.write(silence)
    started_s = time.process_time()
    with pytest.raises(PayloadTooLarge, match="at most 60 s"):
        decode_audio(file.getvalue(), RATE, LIMITS)
    assert time.process_time() - started_s < LITTLE_S


@pytest.mark.parametrize("num_samples", [0, RATE, RATE * 59, (1 << 36) - 1])
def test_a_flac_header_that_lies_does_not_pass_the_limit(num_samples: int) -> None:
    started_s = time.process_time()
    try:
        samples = decode_audio(flac_declaring(num_samples, 90.0), RATE, LIMITS)
    except InvalidInput:
        samples = numpy.zeros(0, numpy.float32)
    assert len(samples) <= LIMITS.max_s * RATE
    assert time.process_time() - started_s < LITTLE_S


def test_ten_hours_of_silence_are_refused_by_their_header() -> None:
    data = flac_declaring(10 * 3600 * RATE, 2.0)
    started_s = time.process_time()
    with pytest.raises(PayloadTooLarge, match="36000 s"):
        decode_audio(data, RATE, LIMITS)
    assert time.process_time() - started_s < LITTLE_S


def test_the_container_is_named_by_the_first_bytes() -> None:
    kinds = {"WAV": "wav", "FLAC": "flac", "OGG": "ogg", "MP3": "mp3", "m4a": "mp4", "webm": "webm"}
    assert {kind: container_of(audio_file(tones(0.2), kind)) for kind in kinds} == kinds


def test_long_recordings_are_cut_at_quiet_points() -> None:
    rate, window_s = 1000, 4.0
    sound = numpy.ones(int(9.5 * rate), numpy.float32)
    for quiet_s in (3.6, 7.2):
        sound[int(quiet_s * rate) : int((quiet_s + 0.2) * rate)] = 0.01
    cuts = cut_points(sound, rate, window_s)
    assert cuts[0][0] == 0
    assert cuts[-1][1] == len(sound)
    assert [end for _, end in cuts[:-1]] == [start for start, _ in cuts[1:]]
    assert all(end - start <= window_s * rate for start, end in cuts)
    assert 3600 <= cuts[0][1] <= 3800
    assert 7200 <= cuts[1][1] <= 7400
    assert cut_points(sound[:4000], rate, window_s) == [(0, 4000)]
    # what comes later does not move a cut
    assert cut_points(sound[:8000], rate, window_s)[:1] == cuts[:1]
