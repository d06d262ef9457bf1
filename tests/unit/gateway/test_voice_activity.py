"""Where speech begins and ends in the audio of a realtime session."""

import numpy
import pytest

from tests.fakes.recordings import tones
from tokenmesh.services.gateway.apis.realtime.audio_input import (
    InputBuffer,
    SpeechStarted,
    SpeechStopped,
    TurnDetection,
)
from tokenmesh.services.gateway.apis.realtime.errors import EmptyBuffer
from tokenmesh.shared.errors import InvalidInput

RATE = 24000


def pcm(samples: "numpy.ndarray[tuple[int], numpy.dtype[numpy.float32]]") -> bytes:
    return (samples * 32767).astype("<i2").tobytes()


def silence(seconds: float, level: float = 0.0) -> bytes:
    noise = numpy.random.default_rng(1).standard_normal(int(seconds * RATE)) * level
    return pcm(noise.astype(numpy.float32))


def speech(seconds: float) -> bytes:
    return pcm(tones(seconds, rate=RATE))


def events_of(buffer: InputBuffer, *parts: bytes, size: int = 4000) -> list[object]:
    data = b"".join(parts)
    found: list[object] = []
    for start in range(0, len(data), size):
        found += [each for each in buffer.append(data[start : start + size]) if each is not None]
    return found


@pytest.mark.parametrize("size", [2, 960, 4000, 48000])
def test_speech_between_silences_is_one_turn(size: int) -> None:
    buffer = InputBuffer(RATE, 60.0, TurnDetection())
    seconds = 0.2 if size == 2 else 1.0
    parts = silence(seconds, 0.001), speech(1.0), silence(0.8, 0.001)
    started, stopped = events_of(buffer, *parts, size=size)
    assert isinstance(started, SpeechStarted)
    assert isinstance(stopped, SpeechStopped)
    expected_ms = max(0, seconds * 1000 - 300)
    assert abs(started.at_ms - expected_ms) <= 60
    assert abs(stopped.at_ms - (seconds + 1.5) * 1000) <= 80
    length_ms = len(stopped.audio) // 2 * 1000 // RATE
    assert abs(length_ms - (stopped.at_ms - started.at_ms)) <= 1
    assert not buffer.is_speech


def test_noise_alone_is_not_speech_and_is_forgotten() -> None:
    buffer = InputBuffer(RATE, 60.0, TurnDetection())
    assert events_of(buffer, *[silence(5.0, 0.004)] * 3) == []
    assert len(buffer.commit()) < RATE
    with pytest.raises(EmptyBuffer):
        buffer.commit()


def test_two_turns_keep_their_own_audio() -> None:
    buffer = InputBuffer(RATE, 60.0, TurnDetection(silence_duration_ms=200, prefix_padding_ms=0))
    parts = silence(0.5), speech(0.6), silence(0.6), speech(0.9), silence(0.6)
    events = events_of(buffer, *parts)
    assert [type(each) for each in events] == [SpeechStarted, SpeechStopped] * 2
    stops = [each for each in events if isinstance(each, SpeechStopped)]
    lengths = [len(each.audio) / 2 / RATE for each in stops]
    assert lengths[0] == pytest.approx(0.8, abs=0.08)
    assert lengths[1] == pytest.approx(1.1, abs=0.08)


def test_endless_speech_is_cut_and_memory_is_bounded() -> None:
    buffer = InputBuffer(RATE, 2.0, TurnDetection())
    events = events_of(buffer, *[speech(1.0)] * 5)
    stops = [each for each in events if isinstance(each, SpeechStopped)]
    assert len(stops) == 2
    assert all(len(each.audio) <= 2 * 2 * RATE for each in stops)
    with pytest.raises(InvalidInput, match="at most 2 s"):
        list(buffer.append(bytes(5 * 2 * RATE)))


def test_without_detection_the_client_commits() -> None:
    buffer = InputBuffer(RATE, 2.0, None)
    assert events_of(buffer, speech(0.5), silence(1.0)) == []
    with pytest.raises(InvalidInput, match="commit or clear"):
        list(buffer.append(speech(1.0)))
    assert len(buffer.commit()) == int(1.5 * RATE) * 2
    list(buffer.append(speech(0.1)))
    buffer.clear()
    with pytest.raises(EmptyBuffer):
        buffer.commit()
    with pytest.raises(InvalidInput, match="ends within a sample"):
        list(buffer.append(b"x"))


@pytest.mark.parametrize("detection", [None, TurnDetection()])
@pytest.mark.parametrize("size", [2, 960, 4000, 96_000])
def test_what_is_read_while_it_arrives_is_what_is_committed(
    detection: TurnDetection | None, size: int
) -> None:
    seconds = 0.2 if size == 2 else 1.0
    data = silence(seconds, 0.001) + speech(1.0) + silence(0.8, 0.001) + speech(0.4)
    buffer, read, committed = InputBuffer(RATE, 60.0, detection), b"", list[bytes]()
    for start in range(0, len(data), size):
        for event in buffer.append(data[start : start + size]):
            if isinstance(event, SpeechStopped):
                assert event.audio.startswith(read)
                committed.append(event.audio)
                read = b""
        if detection is None or buffer.is_speech:
            read += buffer.read()
    rest = buffer.commit()
    assert rest.startswith(read)
    assert len(rest) - len(read) < RATE // 20  # less than a frame is not measured yet
    assert len(committed) == (0 if detection is None else 1)
