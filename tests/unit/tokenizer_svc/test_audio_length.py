"""Files are read to their end, whatever length their headers declare."""

import io
import struct
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from tests.fakes.recordings import RATE, audio_file, streamed_file, tones
from tokenmesh.services.tokenizer_svc.media.audio_file import AudioLimits, decode_audio
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge

LIMITS = AudioLimits(max_s=60.0)
SOUND = tones(2.0)
PCM = (SOUND * 32767).astype("<i2").tobytes()
TITLE = b"LIST" + struct.pack("<I", 26) + b"INFOISFT" + struct.pack("<I", 14) + b"Lavf61.1.100\0\0"
ODD = b"LIST" + struct.pack("<I", 5) + b"abcde"
NOTHING = b"data" + bytes(4)
UNKNOWN = [0, 0x7FFFFFFF, 0x7FFFFFFF - 36, 0x7FFFF000, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFF - 36]
"""Sizes of a stream that ElevenLabs, sox, arecord, ffmpeg, browsers and others write."""


def wav(size: int, riff: int = 0, before: bytes = b"", after: bytes = b"") -> bytes:
    form = struct.pack("<HHIIHH", 1, 1, RATE, RATE * 2, 2, 16)
    head = struct.pack("<4sI4s4sI", b"RIFF", riff, b"WAVE", b"fmt ", len(form)) + form + before
    return head + struct.pack("<4sI", b"data", size) + PCM + after


def long_wav(size: int) -> bytes:
    """RF64, whose sizes of 64 bits are in a chunk of their own."""
    sizes = struct.pack("<4sIQQQI", b"ds64", 28, 0, size, 0, 0)
    file = wav(0xFFFFFFFF, 0xFFFFFFFF)
    return b"RF64" + file[4:12] + sizes + file[12:]


WAVS: dict[str, bytes] = {
    **{f"{size:#x}": wav(size) for size in UNKNOWN},
    **{f"{size:#x} after a title": wav(size, size, before=TITLE) for size in UNKNOWN},
    **{f"{size:#x} of the file": wav(len(PCM), size) for size in [*UNKNOWN, 10, len(PCM) + 36]},
    "a title after the samples": wav(len(PCM), after=TITLE),
    "more than there is": wav(2 * len(PCM)),
    "a chunk of odd size": wav(len(PCM), before=ODD + b"\0"),
    "a chunk of odd size without padding": wav(0xFFFFFFFF, before=ODD),
    "an empty chunk before the samples": wav(len(PCM), before=NOTHING),
    "empty chunks before a stream": wav(0xFFFFFFFF, before=NOTHING + TITLE + NOTHING),
    "64 bits": long_wav(len(PCM)),
    "64 bits of a stream": long_wav(0),
    "64 bits of a longer file": long_wav(1 << 40),
}


@pytest.mark.parametrize("name", WAVS)
def test_a_wav_file_is_read_to_its_end(name: str) -> None:
    samples = decode_audio(WAVS[name], RATE, LIMITS)
    numpy.testing.assert_array_equal(samples, numpy.frombuffer(PCM, "<i2") / numpy.float32(32768))


def test_a_wav_file_without_samples_is_refused_and_its_title_is_not_heard() -> None:
    empty = wav(0)[: -len(PCM)]
    for data, reason in ((empty, "no audio"), (empty + TITLE, "no audio"), (empty[:40], "samples")):
        with pytest.raises(InvalidInput, match=reason):
            decode_audio(data, RATE, LIMITS)


def test_a_stream_of_more_than_may_be_is_refused() -> None:
    data = wav(0xFFFFFFFF) + bytes(2 * RATE * 60)
    with pytest.raises(PayloadTooLarge, match="at most 60 s"):
        decode_audio(data, RATE, LIMITS)


@pytest.mark.parametrize(
    ("kind", "codec", "options"),
    [
        ("wav", "pcm_s16le", {}),
        ("wav", "pcm_f32le", {}),
        ("aiff", "pcm_s16be", {}),
        ("flac", "flac", {}),
        ("ogg", "libopus", {}),
        ("mp3", "libmp3lame", {}),
        ("webm", "libopus", {"live": "1"}),
        ("mp4", "aac", {"movflags": "frag_keyframe+empty_moov+default_base_moof"}),
    ],
)
def test_what_ffmpeg_writes_into_a_pipe_is_read_to_its_end(
    kind: str, codec: str, options: dict[str, str]
) -> None:
    sound = tones(9.0, rate=48000)
    data = streamed_file(sound, kind, codec, 48000, options)
    # a codec adds a tenth of a second at most
    assert 9.0 <= len(decode_audio(data, RATE, LIMITS)) / RATE < 9.1


def with_pause(seconds: float, rate: int, channels: int) -> numpy.ndarray[Any, Any]:
    """Whose bitrate changes, so that no part tells the length of the whole."""
    sound = tones(seconds, rate=rate)
    sound[len(sound) // 4 : -len(sound) // 4] = 0
    return sound if channels == 1 else numpy.stack([sound, sound], axis=1)


def frame_after(data: bytes) -> int:
    """Where the frame begins that follows the one with the tag."""
    return data.index(data[:2], 4)


def with_count(data: bytes, count: int) -> bytes:
    """An MP3 whose tag declares so many frames."""
    place = max(data.find(b"Xing"), data.find(b"Info")) + 8
    return data[:place] + struct.pack(">I", count) + data[place + 4 :]


def with_vbri(data: bytes) -> bytes:
    """As Fraunhofer's encoder writes it: a frame of silence with a tag of its own."""
    end = frame_after(data)
    frame = data[:4] + bytes(32) + b"VBRI" + bytes(10) + struct.pack(">I", 10)
    return frame.ljust(end, b"\0")[:end] + data[end:]


def title_at_end(kind: bytes) -> bytes:
    """Make a title that holds what looks like frames."""
    fields = (b"\xff\xfb\x90\0" * 40)[:125]
    if kind == b"TAG":
        return kind + fields
    parts = struct.pack("<IIII8x", 2000, 128 * 500 + 32, 1, 1 << 31)
    return kind + parts + b"\xff\xfb\x90\0" * 128 * 125 + kind + parts


PICTURE = b"ID3\3\0\0" + bytes([0, 5, 0, 0]) + bytes(5 << 14)
"""A tag of 80 KiB, as it begins the second of two files."""
JUNK = "junk between frames"
MP3S: dict[str, Callable[[bytes], bytes]] = {
    "no tag": lambda data: data[frame_after(data) :],
    "no count": lambda data: with_count(data, 0),
    "a small count": lambda data: with_count(data, 10),
    "a large count": lambda data: with_count(data, 0xFFFFFFFF),
    "another tag": with_vbri,
    "a title": lambda data: b"ID3\3\0\0\0\0\0\x10" + bytes(16) + data[frame_after(data) :],
    "titles at the end": lambda data: (
        data[frame_after(data) :] + title_at_end(b"APETAGEX") + title_at_end(b"TAG")
    ),
    JUNK: lambda data: data[frame_after(data) :] + b"junk" * 20 + data[frame_after(data) :][:100],
}
SLOW = [(8000, 2), (22050, 1), (22050, 2), (44100, 1), (48000, 1), (48000, 2)]
RATES = [(8000, 1), (44100, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]


@pytest.mark.parametrize("name", MP3S)
@pytest.mark.parametrize(("rate", "channels"), RATES)
def test_an_mp3_file_is_read_to_its_end(name: str, rate: int, channels: int) -> None:
    data = audio_file(with_pause(4.0, rate, channels), "MP3", rate)
    assert len(decode_audio(data, RATE, LIMITS)) == pytest.approx(4 * RATE, abs=2)
    samples = decode_audio(MP3S[name](data), RATE, LIMITS)
    assert 4.0 <= len(samples) / RATE < 4.3
    if name != JUNK:  # a frame with a tag holds silence
        assert len(samples) == len(decode_audio(MP3S["no tag"](data), RATE, LIMITS))


def checksum(data: bytes) -> bytes:
    value = 0xFFFF
    for bit in (byte >> place & 1 for byte in data for place in range(7, -1, -1)):
        value = (value << 1 ^ (0x8005 if value >> 15 ^ bit else 0)) & 0xFFFF
    return value.to_bytes(2, "big")


def with_checksums(data: bytes, size: int, sides: int) -> bytes:
    """An MP3 of frames that do not refer to each other, and whose last bytes are unused.

    The first frame of 320,000 bits a second has `size` bytes, without padding.
    """
    made, place = b"", 0
    while place < len(data):
        head = bytes([0xFF, data[place + 1] & 0xFE]) + data[place + 2 : place + 4]
        end = place + size + (head[2] >> 1 & 1)
        body = data[place + 4 : end - 2]
        made, place = made + head + checksum(head[2:] + body[:sides]) + body, end
    return made


@pytest.mark.parametrize("change", [bytes, *MP3S.values()], ids=["a tag", *MP3S])
def test_an_mp3_file_with_checksums_is_read_to_its_end(change: Callable[[bytes], bytes]) -> None:
    sound = tones(1.0, rate=44100)
    plain = audio_file(sound, "MP3", 44100, bitrate_mode="CONSTANT", compression_level=0.0)
    data = with_checksums(plain, 1044, 17)
    samples = decode_audio(change(data), 44100, LIMITS)
    if change is not MP3S[JUNK]:
        assert len(samples) == len(decode_audio(MP3S["no tag"](data), 44100, LIMITS))
    late = decode_audio(plain, 44100, LIMITS)[20_000:21_000]
    places = numpy.lib.stride_tricks.sliding_window_view(samples[20_000:25_000], 1000)
    assert numpy.abs(places - late).max(axis=1).min() < 1e-3


@pytest.mark.parametrize("size", [1100, 70_000])
@pytest.mark.parametrize("change", [bytes, MP3S["no tag"], MP3S["a small count"]])
def test_an_mp3_file_with_a_hole_is_refused(size: int, change: Callable[[bytes], bytes]) -> None:
    data = change(audio_file(tones(4.0), "MP3"))
    middle = data.index(data[:2], len(data) // 2)
    with pytest.raises(InvalidInput, match="the mp3 file is damaged"):
        decode_audio(data[:middle] + bytes(size) + data[middle:], RATE, LIMITS)


@pytest.mark.parametrize("between", [b"", PICTURE, title_at_end(b"TAG")])
def test_mp3_files_of_other_rates_and_channels_may_follow_each_other(between: bytes) -> None:
    stereo = numpy.stack([tones(1.0), tones(1.0)], axis=1)
    files = [audio_file(tones(1.0, rate=rate), "MP3", rate) for rate in (RATE, 44100)]
    data = between.join([*files, audio_file(stereo, "MP3"), files[0], files[0]])
    assert 5.0 <= len(decode_audio(data, RATE, LIMITS)) / RATE < 5.2
    with pytest.raises(InvalidInput, match="again and again"):
        decode_audio(b"".join(files) * 33, RATE, LIMITS)


@pytest.mark.parametrize("kind", ["MP3", "OGG", "OPUS"])
def test_files_that_were_appended_to_each_other_are_all_read(kind: str) -> None:
    first, second = (audio_file(tones(2.0, seed=seed), kind) for seed in (1, 2))
    samples = decode_audio(first + second, RATE, LIMITS)
    assert 4.0 <= len(samples) / RATE < 4.3
    late = decode_audio(second, RATE, LIMITS)[RATE // 2 : RATE]
    place = len(samples) - 2 * RATE
    found = max(
        float(numpy.dot(late, samples[place + shift :][: len(late)])) for shift in range(0, RATE, 8)
    )
    assert found == pytest.approx(float(numpy.dot(late, late)), rel=0.1)


def test_appended_streams_may_have_different_rates() -> None:
    both = audio_file(tones(2.0), "OGG") + audio_file(tones(1.0, rate=44100), "OGG", 44100)
    assert len(decode_audio(both, RATE, LIMITS)) == pytest.approx(3 * RATE, abs=50)


@pytest.mark.parametrize("size", [0, 8, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("frames", [0, 0xFFFFFFFF, len(SOUND)])
def test_an_aiff_file_is_read_to_its_end(size: int, frames: int) -> None:
    data = bytearray(audio_file(SOUND, "AIFF"))
    form, samples = data.index(b"COMM"), data.index(b"SSND")
    data[form + 10 : form + 14] = struct.pack(">I", frames)
    data[samples + 4 : samples + 8] = struct.pack(">I", size)
    assert len(decode_audio(bytes(data), RATE, LIMITS)) == len(SOUND)


def test_a_flac_file_of_unknown_length_is_read_to_its_end() -> None:
    data = bytearray(audio_file(SOUND, "FLAC"))
    facts = int.from_bytes(data[18:26], "big")  # rate, channels, bits, samples
    data[18:26] = (facts >> 36 << 36).to_bytes(8, "big")
    assert len(decode_audio(bytes(data), RATE, LIMITS)) == len(SOUND)
    with pytest.raises(InvalidInput, match="damaged"):
        decode_audio(bytes(data[: len(data) // 2]), RATE, LIMITS)


def test_every_cut_of_a_file_gives_samples_or_an_error() -> None:
    for kind in ("WAV", "AIFF", "MP3", "OGG", "FLAC"):
        data = audio_file(tones(0.5), kind)
        for end in range(0, len(data), max(1, len(data) // 40)):
            try:
                samples = decode_audio(data[:end], RATE, LIMITS)
            except InvalidInput:
                continue
            assert len(samples) <= RATE


def test_frames_and_pages_without_end_are_walked_in_little_time() -> None:
    junk = io.BytesIO()
    frame = audio_file(tones(0.2), "MP3")[:288]
    junk.write(frame + b"\xff" * 2_000_000)
    for data in (junk.getvalue(), (b"OggS\0\2" + bytes(21)) * 50_000):
        with pytest.raises(InvalidInput):
            decode_audio(data, RATE, LIMITS)
