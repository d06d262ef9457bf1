"""Videos are read in known containers and codecs, within bounds, and refused with a reason."""

from contextlib import suppress

import numpy
import pytest

from tests.fakes.bombs import mp4_declaring
from tests.fakes.videos import pictures, video_file
from tokenmesh.services.tokenizer_svc.media.video_file import VideoLimits, open_video
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge

LIMITS = VideoLimits(max_s=60.0, max_pixels=100_000, max_frames=64, max_total_pixels=10**7)


def read(data: bytes, indices: list[int] | None = None) -> list[numpy.ndarray]:
    with open_video(data, LIMITS) as video:
        wanted = list(range(video.facts.num_frames)) if indices is None else indices
        return list(video.frames(wanted))


@pytest.mark.parametrize("container", ["mp4", "webm"])
def test_frames_are_those_that_were_encoded(container: str) -> None:
    frames = pictures(12)
    data = video_file(frames, container=container)
    with open_video(data, LIMITS) as video:
        facts = video.facts
    assert (facts.num_frames, facts.fps, facts.height, facts.width) == (12, 8.0, 32, 48)
    found = read(data)
    assert len(found) == 12
    for ours, theirs in zip(found, frames, strict=True):
        assert numpy.abs(ours.astype(int) - theirs).mean() < 12
    some = read(data, [0, 3, 3, 11])
    for index, frame in zip([0, 3, 3, 11], some, strict=True):
        numpy.testing.assert_array_equal(frame, found[index])


def test_a_file_of_another_kind_is_refused() -> None:
    for data in (b"", b"hello", b"GIF89a" + bytes(50), b"\x89PNG\r\n\x1a\n"):
        with pytest.raises(InvalidInput, match="not a video of a known format"):
            read(data)
    with pytest.raises(InvalidInput, match="codec mjpeg is not supported"):
        read(video_file(pictures(2), codec="mjpeg"))


def test_a_video_over_a_bound_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(PayloadTooLarge, match="400x300 pixels, at most 100000"):
        read(video_file(pictures(2, 400, 300)))
    from fractions import Fraction

    with pytest.raises(PayloadTooLarge, match="36000 s long, at most 60 s"):
        read(video_file(pictures(10), fps=Fraction(1, 3600)))


def test_absurd_dimensions_cost_nothing() -> None:
    data = mp4_declaring(video_file(pictures(4)), 65_535, 65_535)
    with suppress(InvalidInput):  # or the stream's own size is taken
        assert read(data)[0].shape == (32, 48, 3)
    with pytest.raises(PayloadTooLarge, match="pixels, at most"):
        read(video_file(pictures(1, 16_000, 16)))


def test_a_damaged_or_truncated_file_is_refused() -> None:
    data = video_file(pictures(30, 96, 64), codec="mpeg4")
    with pytest.raises(InvalidInput, match=r"damaged|no video|cut off"):
        read(data[: len(data) // 2])
    start = data.index(b"mdat") + 8
    noise = numpy.random.default_rng(0).bytes(len(data) // 3)
    with pytest.raises(InvalidInput, match=r"damaged|cut off"):
        read(data[:start] + noise + data[start + len(noise) :])


def test_every_flipped_byte_gives_frames_or_an_error() -> None:
    data = video_file(pictures(3), codec="mpeg4")
    messages: list[str] = []
    for place in range(0, len(data), 61):
        broken = bytearray(data)
        broken[place] ^= 0xFF
        try:
            assert all(frame.ndim == 3 for frame in read(bytes(broken)))
        except InvalidInput as error:
            messages.append(error.message)
    assert messages
    assert "0x" not in "".join(messages)


def test_a_file_without_video_is_refused() -> None:
    import io

    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("aac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(
            numpy.zeros((1, 1024), numpy.float32), format="fltp", layout="mono"
        )
        frame.sample_rate = 16_000
        out.mux(stream.encode(frame))
        out.mux(stream.encode())
    with pytest.raises(InvalidInput, match="holds no video"):
        read(file.getvalue())
