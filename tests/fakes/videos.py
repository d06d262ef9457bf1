"""Video files made on the spot, with PyAV."""

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
import numpy

CODECS = {"mp4": "libx264", "webm": "libvpx-vp9"}


def pictures(count: int, width: int = 48, height: int = 32, seed: int = 0) -> list[numpy.ndarray]:
    """Frames of smooth color that change from one to the next."""
    draw = numpy.random.default_rng(seed)
    corners = draw.integers(0, 256, (count, 2, 2, 3))
    down, right = numpy.linspace(0, 1, height), numpy.linspace(0, 1, width)
    rows = corners[:, :1] * (1 - down)[None, :, None, None]
    rows = rows + corners[:, 1:] * down[None, :, None, None]
    left, other = rows[:, :, :1], rows[:, :, 1:]
    found = left * (1 - right)[None, None, :, None] + other * right[None, None, :, None]
    return list(found.round().astype(numpy.uint8))


def video_file(
    frames: Sequence[numpy.ndarray],
    *,
    container: str = "mp4",
    codec: str = "",
    fps: Fraction | int = 8,
    sound: numpy.ndarray | None = None,
) -> bytes:
    """The file's bytes. sound: samples of 16 kHz, which become AAC."""
    file = io.BytesIO()
    height, width = frames[0].shape[:2]
    with av.open(file, "w", format=container) as out:
        stream: Any = out.add_stream(codec or CODECS[container], rate=fps)
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.thread_count = 1
        voice: Any = None if sound is None else out.add_stream("aac", rate=16000, layout="mono")
        for picture in frames:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        out.mux(stream.encode())
        if sound is not None:
            size = voice.codec_context.frame_size
            for start in range(0, len(sound), size):
                part = numpy.ascontiguousarray(sound[None, start : start + size])
                frame = av.AudioFrame.from_ndarray(part, format="fltp", layout="mono")
                frame.sample_rate = 16000
                out.mux(voice.encode(frame))
            out.mux(voice.encode(None))
    return file.getvalue()
